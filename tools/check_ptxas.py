"""Fails where ptxas spilled more registers than is known, or serialised wgmma instructions.

    cmake --build build 2>&1 | tee build.log; python tools/check_ptxas.py build.log

Reads a build log with the output of `ptxas -v` in it, as cmake/cuda.cmake asks for.
"""

import re
import sys
from pathlib import Path

# "ptxas info    : Compiling entry function '_Z6kernelv' for 'sm_80'"
ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>[^']+)'")
# "0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads"
SPILL = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
# "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
#  due to insufficient register resources for the wgmma pipeline in the function '_Z6kernelv'"
SERIALISED = re.compile(r"\(C75(?:10|12|14|15)\).*")

# Known spills: part of the mangled name of a kernel, and the most bytes that it stores; the first
# that fits counts. Products of floats take each operand as two TF32 numbers, which is more than
# there are registers for; the worst is sm_80, whose tiles fit 99 KB of shared memory too.
KNOWN_SPILLS = (("F32ELi256", 4352), ("F32ELi", 832), ("", 16))


def is_known(kernel: str, stores: int) -> bool:
    """Whether a kernel may spill that many bytes."""
    return stores <= next(most for name, most in KNOWN_SPILLS if name in kernel)


def findings(log: str) -> tuple[int, list[str]]:
    """Returns how many kernels were compiled (each architecture counts) and what is wrong."""
    kernels = 0
    found = []
    kernel = "?"
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            kernels += 1
            kernel = f"{entry['name']} for {entry['architecture']}"
        elif (spill := SPILL.search(line)) and not is_known(kernel, int(spill["stores"])):
            found.append(f"{kernel}: {spill[0]}")
        elif serialised := SERIALISED.search(line):
            found.append(f"{kernel}: {serialised[0]}")
    return kernels, found


def main(paths: list[str]) -> int:
    kernels, found = findings("\n".join(Path(path).read_text(errors="replace") for path in paths))
    for line in found:
        print(line)
    print(f"check_ptxas: {kernels} kernels, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
