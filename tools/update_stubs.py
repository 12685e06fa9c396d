"""Writes the type stubs of the native modules into jaxflash/, or checks them.

    python tools/update_stubs.py [--check]

The stubs are committed, since type checkers read the source tree, where no native module lies.
Needs nanobind, and jaxflash installed; a native module that is not installed is left alone.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from nanobind.stubgen import StubGen  # pyright: ignore[reportMissingTypeStubs]

PACKAGE = Path(__file__).parent.parent / "jaxflash"


def stub_of(module: ModuleType) -> str:
    generator = StubGen(module)
    generator.put(module)
    return generator.get()


def main(check: bool) -> int:
    stale = 0
    for name in ("_cpu", "_cuda"):
        try:
            module = importlib.import_module(f"jaxflash.{name}")
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        path = PACKAGE / f"{name}.pyi"
        stub = stub_of(module)
        if path.exists() and path.read_text() == stub:
            continue
        stale += 1
        print(f"{path}: {'stale; run tools/update_stubs.py' if check else 'written'}")
        if not check:
            path.write_text(stub)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
