"""Prints the tables of numerics.md and memory.md: `python docs/measure.py`."""

import jax
import jax.numpy as jnp

from jaxflash.bench.contenders import CONTENDERS
from jaxflash.bench.measure import relative_errors
from jaxflash.bench.problems import (
    Attention,
    Problem,
    dense_attention,
    forward,
    forward_and_backward,
    jaxflash_attention,
    make_operands,
)


def contenders(problem: Problem) -> dict[str, Attention]:
    """Attention functions by name."""
    return {
        "jaxflash, native": jaxflash_attention(problem, "native"),
        "jaxflash, xla": jaxflash_attention(problem, "xla"),
        "jax.nn, xla": CONTENDERS["jax.nn xla"].build(problem),
    }


def print_errors() -> None:
    """Relative errors of output and gradients, norm of difference over norm."""
    whats = {"output": "output", "query": "query's gradient", "key": "key's", "value": "value's"}
    for dtype in ("float32", "bfloat16"):
        problem = Problem(1, 1024, 4, 64, dtype, is_causal=True)
        arrays = make_operands(problem)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
            exact = jax.jit(forward_and_backward(dense_attention(problem), problem))(*wide)
        names = contenders(problem)
        errors = {
            name: relative_errors(jax.jit(forward_and_backward(attention, problem))(*arrays), exact)
            for name, attention in names.items()
        }
        print("| dtype | what | " + " | ".join(names) + " |")
        for result, what in whats.items():
            cells = (f"{errors[name][result]:.1e}" for name in names)
            print(f"| {dtype} | {what} | " + " | ".join(cells) + " |")


def print_memory() -> None:
    """Bytes that XLA sets aside beside operands and results, B=1, N=16, T=2048, H=128, bfloat16."""
    problem = Problem(1, 2048, 16, 128, is_causal=True)
    operands = problem.differentiable()
    for name, attention in contenders(problem).items():
        programs = (
            jax.jit(forward(attention, problem)).lower(operands, {}),
            jax.jit(forward_and_backward(attention, problem)).lower(operands, {}, problem.query),
        )
        sizes = (p.compile().memory_analysis().temp_size_in_bytes / 2**20 for p in programs)
        print(f"| {name} | " + " | ".join(f"{size:.1f} MiB" for size in sizes) + " |")


if __name__ == "__main__":
    print_errors()
    print_memory()
