"""Checks, times and weighs the contenders of a problem."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash.bench.contenders import OURS, default_contenders
from jaxflash.bench.costs import matmul_flops
from jaxflash.bench.presets import Group
from jaxflash.bench.problems import (
    DIRECTIONS,
    Arrays,
    Direction,
    Problem,
    make_operands,
    normals,
)
from jaxflash.bench.programs import Prepared, Programs, prepare
from jaxflash.bench.results import BUDGET_SPENT, FAILURES, Row, rated, reason
from jaxflash.bench.timing import Call, Times, take_turns

CHUNK = 8  # problems compiled together
MATMUL_SIZE = {"cpu": 2048, "gpu": 8192}
COPIED_BYTES = {"cpu": 2**28, "gpu": 2**32}
MATMUL = "matrix product"
REFERENCE = "reference"
"""What stands among the absent where there is nothing to compare results with."""


NOT_A_NUMBER = 1e300
"""The error of a result with NaN or infinity, which JSON has no word for."""


def relative_errors(found: Arrays, correct: Arrays) -> dict[str, float]:
    """Returns the relative error of each result in the Frobenius norm.

    A result that should be all zeros (a gradient of a query with a single key) is measured by the
    number of its elements.
    """
    errors: dict[str, float] = {}
    for name, array in correct.items():
        difference = np.asarray(found[name], np.float64) - np.asarray(array, np.float64)
        size = float(np.linalg.norm(array)) or math.sqrt(array.size)
        error = float(np.linalg.norm(difference)) / size
        errors[name] = error if math.isfinite(error) else NOT_A_NUMBER
    return errors


def yardstick(dtype: str) -> tuple[Call, int]:
    """Returns a product of two square matrices, and its FLOP.

    In the dtype of a problem; on a CPU in float32, in which CPUs compute whatever the dtype.
    """
    backend = jax.default_backend()
    size = MATMUL_SIZE.get(backend, 4096)
    spec = jax.ShapeDtypeStruct((size, size), jnp.dtype("float32" if backend == "cpu" else dtype))
    product = _product("highest" if spec.dtype == jnp.float32 else None)

    # Made by the first call, whose failure is caught: no room for it stops nobody.
    @functools.cache
    def square() -> jax.Array:
        return normals(0, spec)

    return lambda: product(square(), square()), matmul_flops(size, size, size)


@functools.cache
def _product(precision: str | None) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(jnp.matmul, precision=precision))


def bytes_per_second() -> float | None:
    """Returns the rate at which a large array is read and written, None where it can't be."""
    size = COPIED_BYTES.get(jax.default_backend(), 2**28)
    negate = jax.jit(jnp.negative)

    # Made by the first call, whose failure is caught: no room for it stops nobody.
    @functools.cache
    def array() -> jax.Array:
        return jnp.zeros(size // 4, jnp.float32)

    times, _ = take_turns({"copy": lambda: negate(array())}, jax.block_until_ready)
    return 2 * size / times["copy"]["median_s"] if times else None


def measure(prepared: Prepared) -> list[Row]:
    """Checks and times a problem's contenders; returns a row for each direction."""
    arrays = make_operands(prepared.problem)
    correct, unchecked = _correct(prepared, *arrays)
    return [
        _measure_direction(prepared, direction, arrays, correct, unchecked)
        for direction in DIRECTIONS
    ]


def _correct(
    prepared: Prepared, operands: Arrays, constants: Arrays, cotangent: jax.Array
) -> tuple[Arrays, dict[str, str]]:
    """What results are compared with; nothing, and why, where it can't be computed."""
    problem = prepared.problem
    try:
        program = prepared.expected.result()
        correct = program(
            problem.checked_parts(operands),
            problem.checked_parts(constants),
            problem.checked_part("output", cotangent),
        )
        return jax.device_get(correct), {}
    except Exception as error:
        return {}, {REFERENCE: reason(error)}


def _measure_direction(
    prepared: Prepared,
    direction: Direction,
    arrays: tuple[Arrays, Arrays, jax.Array],
    correct: Arrays,
    unchecked: dict[str, str],
) -> Row:
    problem, absent = prepared.problem, prepared.absent[direction] | unchecked
    calls: dict[str, Call] = {}
    errors: dict[str, dict[str, float]] = {}
    memory: dict[str, dict[str, int]] = {}
    for name, of_one in prepared.programs[direction].items():
        try:
            call = _call(of_one, direction, *arrays)
            found = jax.block_until_ready({"output": call()} if direction == "forward" else call())
            # The plain formula drops other probabilities: right, but not comparable.
            if correct and not (problem.dropout_rate and name == "dense"):
                of_direction = {result: correct[result] for result in found}
                errors[name] = relative_errors(problem.checked_parts(found), of_direction)
            del found
            memory[name] = planned_memory(of_one)
            calls[name] = call
        except FAILURES as error:
            absent[name] = reason(error)
    times, matmul_tflops, failed = _timed(problem, calls)
    if OURS in times and direction in prepared.pure_jax:
        times[OURS]["pure_jax"] = prepared.pure_jax[direction]
    return rated(
        {
            "direction": direction,
            **problem.to_json(),
            "times": times,
            "matmul_tflops": matmul_tflops,
            "errors": errors,
            "memory": memory,
            "absent": absent | failed,
        }
    )


def _call(
    programs: Programs, direction: Direction, operands: Arrays, constants: Arrays, cotangent: Any
) -> Call:
    """Returns the call that is timed; what comes before it runs now."""
    if direction == "forward":
        return functools.partial(programs.timed, operands, constants)
    _, pull = programs.linearize(operands, constants)
    return functools.partial(programs.timed, pull, cotangent)


def _timed(
    problem: Problem, calls: dict[str, Call]
) -> tuple[dict[str, Times], float | None, dict[str, str]]:
    """Times the contenders, each repeat of a program by itself, and a matrix product.

    Returns:
      The contenders' times, the product's rate, and why anybody has none.
    """
    product, flops = yardstick(problem.dtype)
    times, failed = take_turns({**calls, MATMUL: product}, jax.block_until_ready)
    of_product = times.pop(MATMUL, None)
    matmul_tflops = flops / of_product["median_s"] / 1e12 if of_product else None
    shares = {name: _share(of_one, problem.repeats) for name, of_one in times.items()}
    return shares, matmul_tflops, failed


def _share(times: Times, repeats: int) -> Times:
    low, high = times["quartiles_s"]
    return {
        **times,
        "median_s": times["median_s"] / repeats,
        "quartiles_s": [low / repeats, high / repeats],
    }


def planned_memory(programs: Programs) -> dict[str, int]:
    """Returns the bytes that XLA plans for a call, backward for output and gradients in one.

    `arrays_bytes` are operands and results, `workspace_bytes` what it sets aside beside them.
    """
    analysis = (programs.both or programs.timed).memory_analysis()
    if analysis is None:
        return {}
    return {
        "arrays_bytes": analysis.argument_size_in_bytes + analysis.output_size_in_bytes,
        "workspace_bytes": analysis.temp_size_in_bytes,
    }


def absent_rows(problem: Problem, names: Iterable[str], why: str) -> list[Row]:
    """Returns the rows of a problem that nobody solved."""
    return [
        rated(
            {
                "direction": direction,
                **problem.to_json(),
                "times": {},
                "matmul_tflops": None,
                "errors": {},
                "memory": {},
                "absent": dict.fromkeys(names, why),
            }
        )
        for direction in DIRECTIONS
    ]


def contenders_of(group: Group) -> Sequence[str]:
    """Returns who solves a group's problems on the default device."""
    return group.contenders or default_contenders(jax.default_backend())


def measure_group(group: Group, deadline: float) -> Iterator[list[Row]]:
    """Yields the rows of each problem.

    Args:
      group: the problems.
      deadline: from this time on (`time.time()`) problems are left out, and said to be.
    """
    names = contenders_of(group)
    for start in range(0, len(group.problems), CHUNK):
        chunk = group.problems[start : start + CHUNK]
        waits = _prepare_all(chunk, names) if time.time() < deadline else []
        for problem, wait in zip_longest(chunk, waits):
            yield _measure_or_say_why(problem, names, wait, deadline)


def _prepare_all(problems: Iterable[Problem], names: Sequence[str]) -> list[Callable[[], Prepared]]:
    """Prepares problems; nothing is compiled any more when the first is measured."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        waits = [prepare(problem, names, pool) for problem in problems]
        pool.shutdown()
    finally:
        # After an interrupt nobody wants what has not begun to compile.
        pool.shutdown(wait=False, cancel_futures=True)
    return waits


def _measure_or_say_why(
    problem: Problem, names: Iterable[str], wait: Callable[[], Prepared] | None, deadline: float
) -> list[Row]:
    if wait is None or time.time() > deadline:
        return absent_rows(problem, names, BUDGET_SPENT)
    try:
        return measure(wait())
    except Exception as error:
        return absent_rows(problem, names, f"operands: {reason(error)}")
