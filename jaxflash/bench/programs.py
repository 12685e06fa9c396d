"""The programs in which contenders solve a problem, traced, lowered and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from jaxflash.bench.contenders import CONTENDERS
from jaxflash.bench.problems import (
    Problem,
    Specs,
    backward,
    expected,
    forward,
    forward_and_backward,
    linearize,
)
from jaxflash.bench.results import reason


@dataclass(frozen=True)
class Programs:
    """The programs of a contender: traced, lowered or compiled.

    Attributes:
      forward: the output of (operands, constants).
      linearize: the output, and the function from its cotangent to gradients.
      backward: the gradients of (that function, cotangent).
      both: output and gradients of (operands, constants, cotangent), for its memory.
    """

    forward: Any
    linearize: Any
    backward: Any
    both: Any

    def map(self, function: Callable[[Any], Any]) -> Programs:
        """Returns the programs that a function makes of these."""
        return Programs(*(function(getattr(self, name)) for name in self.__dataclass_fields__))


def trace(contender: str, problem: Problem, platform: str) -> Programs:
    """Traces a contender's programs.

    Raises:
      Exception: whatever a contender raises that can't do the problem.
    """
    attention = CONTENDERS[contender].attention(problem, platform)
    specs = problem.differentiable(), problem.constants()
    with jax.default_matmul_precision("highest" if problem.dtype == "float32" else None):
        linearized = jax.jit(linearize(attention)).trace(*specs)
        _, pull = linearized.out_info
        return Programs(
            jax.jit(forward(attention, problem)).trace(*specs),
            linearized,
            jax.jit(backward(problem)).trace(pull, problem.query),
            jax.jit(forward_and_backward(attention, problem)).trace(*specs, problem.query),
        )


def lower_expected(problem: Problem) -> Any:
    """Lowers what results are compared with."""

    def parts(specs: Specs) -> Specs:
        return jax.eval_shape(problem.checked_parts, specs)

    operands, constants = parts(problem.differentiable()), parts(problem.constants())
    cotangent = parts({"output": problem.query})["output"]
    with jax.default_matmul_precision("highest"), jax.enable_x64(problem.dtype == "float32"):
        return jax.jit(expected(problem)).trace(operands, constants, cotangent).lower()


def compile_expected(lowered: Any) -> Any:
    """Compiles what is run once: searching for the fastest products would take longest."""
    on_gpu = jax.default_backend() == "gpu"
    return lowered.compile({"xla_gpu_autotune_level": "0"} if on_gpu else None)


@dataclass(frozen=True)
class Prepared:
    """A problem's compiled programs.

    Attributes:
      problem: what they solve.
      programs: by contender.
      expected: what they are compared with.
      absent: why others have none.
    """

    problem: Problem
    programs: dict[str, Programs]
    expected: Any
    absent: dict[str, str]


def prepare(
    problem: Problem, names: Iterable[str], pool: ThreadPoolExecutor
) -> Callable[[], Prepared]:
    """Traces and lowers a problem's programs, and has the pool compile them.

    Returns:
      A function that waits for them and returns them.
    """
    compiling: dict[str, Programs] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            lowered = trace(name, problem, jax.default_backend()).map(lambda traced: traced.lower())
            compiling[name] = lowered.map(lambda lowered: pool.submit(lowered.compile))
        except Exception as error:
            absent[name] = reason(error)
    compiling_expected = pool.submit(compile_expected, lower_expected(problem))

    def wait() -> Prepared:
        programs: dict[str, Programs] = {}
        for name, futures in compiling.items():
            try:
                programs[name] = futures.map(lambda future: future.result())
            except Exception as error:
                absent[name] = reason(error)
        return Prepared(problem, programs, compiling_expected.result(), absent)

    return wait
