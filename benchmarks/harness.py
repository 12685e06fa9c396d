"""What the benchmarks share: facts of the software, timing on an accelerator, results files."""

import datetime
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TURNS = 7
MEASUREMENT_SECONDS = 0.02


def commit() -> str:
    """Returns the commit of the source tree, marked where it has changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def today() -> str:
    return datetime.date.today().isoformat()


def version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def summary(times: list[float]) -> dict[str, Any]:
    """Returns the median and the quartiles of the seconds of a call, and how many were timed."""
    low, median, high = statistics.quantiles(times, n=4)
    return {"median_s": median, "quartiles_s": [low, high], "calls": len(times)}


def batch_seconds(call: Callable[[], Any], count: int, wait: Callable[[Any], Any]) -> float:
    """Seconds of `count` calls dispatched back to back and one wait for the last result."""
    start = time.perf_counter()
    result = None
    for _ in range(count):
        result = call()
    wait(result)
    return time.perf_counter() - start


def batch_size(call: Callable[[], Any], wait: Callable[[Any], Any]) -> int:
    """Returns how many calls last `MEASUREMENT_SECONDS`; warms up on the way."""
    count = 1
    batch_seconds(call, count, wait)
    while (elapsed := batch_seconds(call, count, wait)) < MEASUREMENT_SECONDS:
        growth = 1.2 * MEASUREMENT_SECONDS / elapsed
        count = math.ceil(count * min(growth, 10))
    return count


def take_turns(
    calls: Mapping[str, Callable[[], Any]], wait: Callable[[Any], Any]
) -> dict[str, dict[str, Any]]:
    """Times calls on an accelerator: `TURNS` measurements of each, alternately.

    Args:
      calls: by name; each dispatches one call and returns its results.
      wait: waits until results are there.

    Returns:
      For each, the `summary` of a call's seconds in each measurement.
    """
    sizes = {name: batch_size(call, wait) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            times[name].append(batch_seconds(call, sizes[name], wait) / sizes[name])
    return {name: summary(of_one) for name, of_one in times.items()}


def reason(error: BaseException) -> str:
    """Returns an error in one line, for the results."""
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return text if len(text) <= 300 else text[:297] + "..."


def write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Returns a benchmark's results."""
    return json.loads(path.read_text())
