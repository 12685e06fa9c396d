"""Fails where code of one instruction set could be linked into the kernels of another.

    python tools/check_symbols.py build

A function that more than one object file defines (an inline function, a template) is kept once by
the linker, whichever object comes first: a std::vector member compiled for AVX-512 may end up in
the baseline kernels and crash on older machines. So whatever the kernels' objects define must carry
the name of its instruction set.
"""

import re
import subprocess
import sys
from pathlib import Path

KERNELS = re.compile(r"jaxflash_cpu_(?P<instruction_set>\w+)\.dir/.*\.o$")


def foreign_symbols(instruction_set: str, symbols: str) -> list[str]:
    """Returns the shared symbols in nm's lines ("address type name") whose names lack the set's."""
    lines = [line.split() for line in symbols.splitlines()]
    # Lower-case types are local to the object, except weak (v, w) and unique (u) ones.
    shared = [name for _, kind, name in lines if kind.isupper() or kind in "uvw"]
    return [name for name in shared if instruction_set not in name]


def main(build_dir: str) -> int:
    objects = found = 0
    for path in Path(build_dir).rglob("*.o"):
        if not (kernels := KERNELS.search(str(path))):
            continue
        objects += 1
        command = ["nm", "--defined-only", str(path)]
        symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for name in foreign_symbols(kernels["instruction_set"], symbols):
            print(f"{path}: {name}")
            found += 1
    print(f"check_symbols: {objects} objects, {found} findings")
    return 0 if objects and not found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
