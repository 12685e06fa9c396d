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

# Known spills: part of the mangled name of a kernel, its architectures, and the most bytes that it
# stores. Backward, sums of 256 float columns take all the registers of the few warps that a tile
# has which fits 99 KB of shared memory; the others are a word or a few outside the inner loop.
KNOWN_SPILLS = (
    ("backward_kernelINS1_3F32ELi256", ("sm_80", "sm_120"), 3200),
    ("forward_kernelINS1_3F32ELi256", ("sm_80", "sm_90", "sm_100", "sm_120"), 64),
    ("forward_kernelINS1_3F32ELi128", ("sm_80", "sm_120"), 24),
    ("16ELi128ENS1_", ("sm_120",), 8),
)


def is_known(kernel: str, architecture: str, stores: int) -> bool:
    """Whether a kernel may spill that many bytes."""
    return stores == 0 or any(
        name in kernel and architecture in architectures and stores <= most
        for name, architectures, most in KNOWN_SPILLS
    )


def findings(log: str) -> tuple[int, list[str]]:
    """Returns how many kernels were compiled (each architecture counts) and what is wrong."""
    kernels = 0
    found = []
    kernel = architecture = "?"
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            kernels += 1
            kernel, architecture = entry["name"], entry["architecture"]
        elif spill := SPILL.search(line):
            if not is_known(kernel, architecture, int(spill["stores"])):
                found.append(f"{kernel} for {architecture}: {spill[0]}")
        elif serialised := SERIALISED.search(line):
            found.append(f"{kernel} for {architecture}: {serialised[0]}")
    return kernels, found


def main(paths: list[str]) -> int:
    kernels, found = findings("\n".join(Path(path).read_text(errors="replace") for path in paths))
    for line in found:
        print(line)
    print(f"check_ptxas: {kernels} kernels, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
