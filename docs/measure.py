"""Prints the tables of numerics.md and memory.md: `python docs/measure.py`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash import flash_attention


def dense(query, key, value):
    """Causal attention as its formula says."""
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    visible = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


CONTENDERS: dict[str, Callable] = {
    "jaxflash, native": functools.partial(flash_attention, is_causal=True, implementation="native"),
    "jaxflash, xla": functools.partial(flash_attention, is_causal=True, implementation="xla"),
    "jax.nn, xla": functools.partial(jax.nn.dot_product_attention, is_causal=True),
}


def with_gradients(attend: Callable) -> Callable:
    """Output and gradients of query, key and value."""

    def run(query, key, value, cotangent):
        output, pull = jax.vjp(attend, query, key, value)
        return output, *pull(cotangent)

    return jax.jit(run)


def print_errors() -> None:
    """Relative errors of output and gradients, norm of difference over norm."""
    shape = 1, 1024, 4, 64
    print("| dtype | what | " + " | ".join(CONTENDERS) + " |")
    for dtype in ("float32", "bfloat16"):
        keys = jax.random.split(jax.random.key(0), 4)
        arrays = [jax.random.normal(key, shape, dtype) for key in keys]
        with jax.enable_x64(True):
            wide = [jnp.asarray(x, jnp.float64) for x in arrays]
            exact = jax.tree.map(np.asarray, with_gradients(dense)(*wide))
        found = [with_gradients(attend)(*arrays) for attend in CONTENDERS.values()]
        for i, what in enumerate(("output", "query's gradient", "key's", "value's")):
            errors = [
                np.linalg.norm(np.asarray(f[i], np.float64) - exact[i]) / np.linalg.norm(exact[i])
                for f in found
            ]
            print(f"| {dtype} | {what} | " + " | ".join(f"{e:.1e}" for e in errors) + " |")


def print_memory() -> None:
    """Bytes that XLA sets aside beside operands and results, B=1, N=16, T=2048, H=128, bfloat16."""
    x = jax.ShapeDtypeStruct((1, 2048, 16, 128), jnp.bfloat16)
    for name, attend in CONTENDERS.items():
        forward = jax.jit(attend).lower(x, x, x).compile().memory_analysis()
        both = with_gradients(attend).lower(x, x, x, x).compile().memory_analysis()
        sizes = (a.temp_size_in_bytes / 2**20 for a in (forward, both))
        print(f"| {name} | " + " | ".join(f"{size:.1f} MiB" for size in sizes) + " |")


if __name__ == "__main__":
    print_errors()
    print_memory()
