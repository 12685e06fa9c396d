"""The memory that a contender really took, measured in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax

from jaxflash.bench.problems import Problem, make_operands
from jaxflash.bench.programs import trace
from jaxflash.bench.results import FAILURES, reason

Peak = dict[str, int | str]
"""The `measured_bytes`, or why they are `not_measured`."""


def _held() -> tuple[int, int]:
    """The bytes that are in use, and the most that were.

    By the device's allocator; on a CPU by the process, whose most is forgotten here.
    """
    statistics = jax.local_devices()[0].memory_stats()
    if statistics:
        return statistics["bytes_in_use"], statistics["peak_bytes_in_use"]
    most = _most_of_process()
    Path("/proc/self/clear_refs").write_text("5")
    return _most_of_process(), most


def _most_of_process() -> int:
    (kilobytes,) = re.findall(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(kilobytes) * 1024


def measure_peak(contender: str, problem: Problem) -> Peak:
    """Returns what output, gradients and workspace took, in a process that did nothing before."""
    traced = trace(contender, problem, "backward", jax.default_backend())
    program = traced.both.lower().compile()
    operands = jax.block_until_ready(make_operands(problem))
    in_use, before = _held()
    jax.block_until_ready(program(*operands))
    _, most = _held()
    # A device's allocator can't forget its peak, which making the operands may have set.
    forgets = jax.default_backend() == "cpu"
    if most <= before and not forgets:
        return {"not_measured": "no more memory was in use than when operands were made"}
    return {"measured_bytes": most - in_use}


def peak_or_reason(contender: str, problem: Problem) -> Peak:
    """Returns what `measure_peak` does, or why it doesn't."""
    try:
        return measure_peak(contender, problem)
    except FAILURES as error:
        return {"not_measured": reason(error)}


def measured_elsewhere(contender: str, problem: Problem) -> Peak:
    """Has a process of its own call `peak_or_reason`; returns what it does, or how it ended."""
    command = [sys.executable, "-P", "-m", "jaxflash.bench", "--peak-of", contender]
    command.append(json.dumps(problem.to_json()))
    # The packages measured are those of this process, not what the working folder may hold.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        return {"not_measured": f"the process ended with {run.returncode}"}
    return json.loads(run.stdout.splitlines()[-1])
