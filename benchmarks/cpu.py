"""Times jaxflash against `jax.nn.dot_product_attention` on the CPU.

    python benchmarks/cpu.py                 # about 10 minutes on 2 cores; an idle machine, please
    python benchmarks/cpu.py --lengths 512 --seconds 0.5

Both run jitted and take turns in the same process, and so does a 2048x2048 float32 matrix product,
the yardstick of what the machine can do. Results are checked in the same run. Prints a table and
writes benchmarks/results/cpu-<model>-<date>.json; benchmarks/plot.py makes the README's table and
picture of it.
"""

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxflash
from flops import attention_flops, matmul_flops
from harness import RESULTS, commit, summary, today, write
from jaxflash import _cpu
from plot import table

BATCH, HEADS, HEAD_DIM = 1, 8, 64
MATMUL_SIZE = 2048

Arrays = tuple[jax.Array, ...]


def cpu_model() -> str:
    """Returns what the processor calls itself."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def inputs(length: int, dtype: str) -> Arrays:
    """Returns random query, key, value and output cotangent."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (BATCH, length, HEADS, HEAD_DIM)
    return tuple(jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys)


def jitted(attention: Callable, *, is_causal: bool, backward: bool) -> Callable[..., Any]:
    """Returns the forward pass, or output and all gradients, of (query, key, value, cotangent)."""

    def forward(query, key, value, cotangent):
        return attention(query, key, value, is_causal=is_causal)

    def forward_and_backward(query, key, value, cotangent):
        output, pull = jax.vjp(lambda *qkv: attention(*qkv, is_causal=is_causal), query, key, value)
        return output, *pull(cotangent)

    return jax.jit(forward_and_backward if backward else forward)


def seconds(function: Callable, arguments: Arrays) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def take_turns(candidates: dict[str, tuple[Callable, Arrays]], budget: float) -> dict[str, Any]:
    """Times each candidate, in turns, for about `budget` seconds in all but at least 5 rounds.

    A turn is two calls, of which the second is timed: the first still pays for what the candidate
    before left behind (jax.nn hands back hundreds of megabytes, and slows down what follows).

    Returns:
      For each, the median and the quartiles of a call's seconds, and the number of calls.
    """
    for function, arguments in candidates.values():
        jax.block_until_ready(function(*arguments))  # compiles, warms up
    times: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    while len(next(iter(times.values()))) < 5 or time.perf_counter() - start < budget:
        for name, (function, arguments) in candidates.items():
            seconds(function, arguments)
            times[name].append(seconds(function, arguments))
    return {name: summary(of_one) for name, of_one in times.items()}


def relative_error(results: Any, expected: Any) -> float:
    """Returns the largest relative error, in the Frobenius norm, of any result."""

    def error(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))

    return max(jax.tree.leaves(jax.tree.map(error, results, expected)))


def measure(length: int, dtype: str, is_causal: bool, backward: bool, budget: float) -> dict:
    """Returns one row of the results."""
    ours = jitted(jaxflash.flash_attention, is_causal=is_causal, backward=backward)
    theirs = jitted(jax.nn.dot_product_attention, is_causal=is_causal, backward=backward)
    arrays = inputs(length, dtype)

    # jax.nn in float32 on the same numbers; in bfloat16 its own error is the measure.
    expected = theirs(*(array.astype(jnp.float32) for array in arrays))
    error = relative_error(ours(*arrays), expected)
    allowed = 1e-5 if dtype == "float32" else 2 * relative_error(theirs(*arrays), expected)
    if error > allowed:
        sys.exit(f"wrong result: error {error:.2e} over {allowed:.2e} ({length=} {dtype=} ...)")
    del expected

    square = jax.random.normal(jax.random.key(1), (MATMUL_SIZE, MATMUL_SIZE), jnp.float32)
    candidates = {
        "jaxflash": (ours, arrays),
        "jax.nn": (theirs, arrays),
        "matmul": (jax.jit(jnp.matmul), (square, square)),
    }
    times = take_turns(candidates, budget)
    flops = attention_flops(
        batch=BATCH,
        query_length=length,
        key_length=length,
        heads=HEADS,
        head_dim=HEAD_DIM,
        is_causal=is_causal,
        backward=backward,
    )
    gflops = {name: flops / times[name]["median_s"] / 1e9 for name in ("jaxflash", "jax.nn")}
    matmul_gflops = matmul_flops(*[MATMUL_SIZE] * 3) / times["matmul"]["median_s"] / 1e9
    return {
        "dtype": dtype,
        "length": length,
        "is_causal": is_causal,
        "backward": backward,
        "times": times,
        "gflops": gflops,
        "matmul_gflops": matmul_gflops,
        "ratio": times["jax.nn"]["median_s"] / times["jaxflash"]["median_s"],
        "share_of_matmul": gflops["jaxflash"] / matmul_gflops,
        "relative_error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times jaxflash against jax.nn on the CPU.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row of the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    settings = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": _cpu.build_facts()["instruction_set"],
        "jax": jax.__version__,
        "jaxflash": jaxflash.__version__,
        "commit": commit(),
        "date": today(),
        "shape": {"B": BATCH, "N": HEADS, "H": HEAD_DIM},
        "rows": [],
    }
    cases = [
        (length, dtype, is_causal, backward)
        for backward in (False, True)
        for dtype in settings.dtypes
        for is_causal in (False, True)
        for length in settings.lengths
    ]
    for case in cases:
        results["rows"].append(measure(*case, settings.seconds))
        print(".", end="", flush=True)
    print()
    print(table(results))

    model = re.sub(r"\W+", "-", results["cpu"].lower()).strip("-")
    path = settings.out / f"cpu-{model}-{results['date']}.json"
    write(results, path)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
