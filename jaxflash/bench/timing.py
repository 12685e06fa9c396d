"""Timing of calls that take turns."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from jaxflash.bench.results import FAILURES, reason

MEASUREMENT_SECONDS = 0.03
MOST_TURNS, FEWEST_TURNS = 7, 3
ROUNDS_SECONDS = 6.0
"""What lasts longer has fewer turns."""

Times = dict[str, Any]
Call = Callable[[], Any]
Wait = Callable[[Any], Any]
Found = TypeVar("Found")


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


def _of_each(
    names: Iterable[str], function: Callable[[str], Found], failed: dict[str, str]
) -> dict[str, Found]:
    """What a function returns for each name. A name for which it raises is left out from then on.

    Args:
      names: in this order.
      function: of a name.
      failed: why it raised, by name; this adds to it.
    """
    found: dict[str, Found] = {}
    for name in names:
        if name in failed:
            continue
        try:
            found[name] = function(name)
        except FAILURES as error:
            failed[name] = reason(error)
    return found


def take_turns(calls: Mapping[str, Call], wait: Wait) -> tuple[dict[str, Times], dict[str, str]]:
    """Times calls alternately, 7 measurements of each, or down to 3 where they are long.

    A measurement is as many calls as last `MEASUREMENT_SECONDS`. A call that is not timed comes
    before it, and pays for what the one before left behind (memory handed back, cold caches).

    Args:
      calls: by name; each dispatches one call and returns its results.
      wait: waits until results are there.

    Returns:
      The `summary` of the seconds of each call, and why others have none: a call that raises stops
      nobody else, even when it has been timed before.
    """
    failed: dict[str, str] = {}
    sizes = _of_each(calls, lambda name: batch_size(calls[name], wait), failed)
    a_round = sum(elapsed * (1 + 1 / count) for count, elapsed in sizes.values())
    turns = int(min(max(ROUNDS_SECONDS / max(a_round, 1e-9), FEWEST_TURNS), MOST_TURNS))

    def seconds(name: str) -> float:
        count, _ = sizes[name]
        batch_seconds(calls[name], 1, wait)
        return batch_seconds(calls[name], count, wait) / count

    times: dict[str, list[float]] = {name: [] for name in sizes}
    for turn in range(turns):
        for name, of_one in _of_each(order_of_turn(list(sizes), turn), seconds, failed).items():
            times[name].append(of_one)
    return {name: summary(of_one) for name, of_one in times.items() if name not in failed}, failed
