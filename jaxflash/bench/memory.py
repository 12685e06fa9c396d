"""The memory that a contender really took, measured in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jax

from jaxflash.bench.problems import Problem, make_operands
from jaxflash.bench.programs import trace


def _forget_peak() -> None:
    """Has the kernel forget the most memory that the process held."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """The most that the device's allocator had handed out; on a CPU, that the process held."""
    statistics = jax.devices()[0].memory_stats()
    if statistics:
        return statistics["peak_bytes_in_use"]
    (kilobytes,) = re.findall(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(kilobytes) * 1024


def measure_peak(contender: str, problem: Problem) -> dict[str, int]:
    """Returns what output, gradients and workspace took, in a process that did nothing before."""
    traced = trace(contender, problem, "backward", jax.default_backend())
    program = traced.both.lower().compile()
    operands = jax.block_until_ready(make_operands(problem))
    _forget_peak()
    before = _peak_bytes()
    jax.block_until_ready(program(*operands))
    return {"measured_bytes": _peak_bytes() - before}


def measured_elsewhere(contender: str, problem: Problem) -> dict[str, int | str]:
    """Has a process of its own call `measure_peak`; returns what it does, or why not."""
    safe_path = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe_path, "-m", "jaxflash.bench", "--peak-of", contender]
    run = subprocess.run([*command, json.dumps(problem.to_json())], capture_output=True, text=True)
    if run.returncode:
        *_, why = run.stderr.splitlines() or [f"the process ended with {run.returncode}"]
        return {"not_measured": why}
    return json.loads(run.stdout.splitlines()[-1])
