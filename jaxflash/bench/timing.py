"""Timing of calls that take turns."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

MEASUREMENT_SECONDS = 0.03
MOST_TURNS, FEWEST_TURNS = 7, 3
ROUNDS_SECONDS = 6.0
"""What lasts longer has fewer turns."""

Times = dict[str, Any]
Call = Callable[[], Any]
Wait = Callable[[Any], Any]


def summary(times: list[float]) -> Times:
    """Returns the median and the quartiles of the seconds of a call, and how many were timed."""
    low, median, high = statistics.quantiles(times, n=4)
    return {"median_s": median, "quartiles_s": [low, high], "measurements": len(times)}


def batch_seconds(call: Call, count: int, wait: Wait) -> float:
    """Seconds of `count` calls dispatched back to back and one wait for the last result."""
    start = time.perf_counter()
    result = None
    for _ in range(count):
        result = call()
    wait(result)
    return time.perf_counter() - start


def batch_size(call: Call, wait: Wait) -> tuple[int, float]:
    """Returns how many calls last `MEASUREMENT_SECONDS`, and how long they do; warms up."""
    count = 1
    batch_seconds(call, count, wait)
    while (elapsed := batch_seconds(call, count, wait)) < MEASUREMENT_SECONDS:
        growth = 1.2 * MEASUREMENT_SECONDS / elapsed
        count = math.ceil(count * min(growth, 10))
    return count, elapsed


def order_of_turn(names: list[str], turn: int) -> list[str]:
    """Returns the names in the order of a turn: shuffled, each turn in its own way.

    A processor slows down after work that takes much power. In a fixed order it would always be the
    same one who comes after that.
    """
    return random.Random(turn).sample(names, len(names))


def take_turns(calls: Mapping[str, Call], wait: Wait) -> dict[str, Times]:
    """Times calls alternately, 7 measurements of each, or down to 3 where they are long.

    A measurement is as many calls as last `MEASUREMENT_SECONDS`. A call that is not timed comes
    before it, and pays for what the one before left behind (memory handed back, cold caches).

    Args:
      calls: by name; each dispatches one call and returns its results.
      wait: waits until results are there.

    Returns:
      For each, the `summary` of a call's seconds in each measurement.
    """
    sizes = {name: batch_size(call, wait) for name, call in calls.items()}
    a_round = sum(elapsed * (1 + 1 / count) for count, elapsed in sizes.values())
    turns = int(min(max(ROUNDS_SECONDS / max(a_round, 1e-9), FEWEST_TURNS), MOST_TURNS))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        for name in order_of_turn(list(calls), turn):
            count = sizes[name][0]
            batch_seconds(calls[name], 1, wait)
            times[name].append(batch_seconds(calls[name], count, wait) / count)
    return {name: summary(of_one) for name, of_one in times.items()}
