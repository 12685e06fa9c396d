"""The programs in which contenders solve a problem, traced, lowered and compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from jaxflash._modules import BACKWARD_TARGET, FORWARD_TARGET
from jaxflash.bench.contenders import CONTENDERS, OURS
from jaxflash.bench.problems import (
    DIRECTIONS,
    Attention,
    Direction,
    Problem,
    Specs,
    backward,
    expected,
    forward,
    forward_and_backward,
    jaxflash_attention,
    linearize,
)
from jaxflash.bench.results import FAILURES, reason


@dataclass(frozen=True)
class Programs:
    """The programs of a contender for one direction: traced, lowered or compiled.

    Attributes:
      timed: forward the output of (operands, constants), backward the gradients of (what
        `linearize` returns beside the output, cotangent).
      linearize: what runs before the one that is timed, on (operands, constants).
      both: output and gradients of (operands, constants, cotangent), for its memory.
    """

    timed: Any
    linearize: Any = None
    both: Any = None

    def map(self, function: Callable[[Any], Any]) -> Programs:
        """Returns the programs that a function makes of these."""
        programs = (self.timed, self.linearize, self.both)
        return Programs(*(program and function(program) for program in programs))


def trace(contender: str, problem: Problem, direction: Direction, platform: str) -> Programs:
    """Traces a contender's programs.

    Raises:
      Exception: whatever a contender raises that can't do the problem.
    """
    return _trace(CONTENDERS[contender].attention(problem, platform), problem, direction)


def _trace(attention: Attention, problem: Problem, direction: Direction) -> Programs:
    specs = problem.differentiable(), problem.constants()
    with jax.default_matmul_precision("highest" if problem.dtype == "float32" else None):
        if direction == "forward":
            return Programs(jax.jit(forward(attention, problem)).trace(*specs))
        linearized = jax.jit(linearize(attention)).trace(*specs)
        _, pull = linearized.out_info
        return Programs(
            jax.jit(backward(problem)).trace(pull, problem.query),
            linearized,
            jax.jit(forward_and_backward(attention, problem)).trace(*specs, problem.query),
        )


TARGETS = {"forward": FORWARD_TARGET, "backward": BACKWARD_TARGET}
"""What jaxflash's programs call where they use its kernels."""


def why_without_kernels(problem: Problem, direction: Direction, timed: Any) -> str | None:
    """Returns why jaxflash's lowered program does without its kernels; None where it uses them."""
    if TARGETS[direction] in timed.as_text():
        return None
    try:
        _trace(jaxflash_attention(problem, "native"), problem, direction).map(lower)
    except NotImplementedError as error:
        return reason(error)
    return None


def lower(program: Any) -> Any:
    """Lowers a traced program for the default device."""
    return program.lower()


def lower_expected(problem: Problem) -> Any:
    """Lowers what results are compared with."""

    def parts(specs: Specs) -> Specs:
        return jax.eval_shape(problem.checked_parts, specs)

    operands, constants = parts(problem.differentiable()), parts(problem.constants())
    cotangent = parts({"output": problem.query})["output"]
    with jax.default_matmul_precision("highest"), jax.enable_x64(problem.dtype == "float32"):
        return jax.jit(expected(problem)).trace(operands, constants, cotangent).lower()


def compile_expected(problem: Problem) -> Any:
    """Compiles what is run once: searching for the fastest products would take longest."""
    lowered = lower_expected(problem)
    on_gpu = jax.default_backend() == "gpu"
    return lowered.compile({"xla_gpu_autotune_level": "0"} if on_gpu else None)


@dataclass(frozen=True)
class Prepared:
    """A problem's compiled programs.

    Attributes:
      problem: what they solve.
      programs: by direction and contender.
      expected: what they are compared with, or what prevents it.
      absent: why others have none, by direction and contender.
      pure_jax: why jaxflash's do without its kernels, by direction, where they do.
    """

    problem: Problem
    programs: dict[Direction, dict[str, Programs]]
    expected: Future[Any]
    absent: dict[Direction, dict[str, str]]
    pure_jax: dict[Direction, str]


def prepare(
    problem: Problem, names: Iterable[str], pool: ThreadPoolExecutor
) -> Callable[[], Prepared]:
    """Traces and lowers a problem's programs, and has the pool compile them.

    Returns:
      A function that waits for them and returns them.
    """
    compiling: dict[tuple[Direction, str], Programs] = {}
    absent: dict[Direction, dict[str, str]] = {direction: {} for direction in DIRECTIONS}
    pure_jax: dict[Direction, str] = {}
    for direction, name in itertools.product(DIRECTIONS, names):
        try:
            traced = trace(name, problem, direction, jax.default_backend())
            lowered = traced.map(lower)
            compiling[direction, name] = lowered.map(lambda program: pool.submit(program.compile))
            if name == OURS and (why := why_without_kernels(problem, direction, lowered.timed)):
                pure_jax[direction] = why
        except FAILURES as error:
            absent[direction][name] = reason(error)
    compiling_expected = pool.submit(compile_expected, problem)

    def wait() -> Prepared:
        programs: dict[Direction, dict[str, Programs]] = {d: {} for d in DIRECTIONS}
        for (direction, name), futures in compiling.items():
            try:
                programs[direction][name] = futures.map(lambda future: future.result())
            except FAILURES as error:
                absent[direction][name] = reason(error)
        return Prepared(problem, programs, compiling_expected, absent, pure_jax)

    return wait
