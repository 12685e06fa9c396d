"""Attention of one head, mapped over heads.

    python examples/vmap_heads.py

Written for one head, `vmap` makes it attention of many, in one call of a kernel: the mapped axis
becomes batch, or a group of queries that share a key where key and value are not mapped. That
gives each head what a call with many heads shares, here its own softmax temperature. Compared
with `jax.nn`'s attention of many heads.
"""

import argparse

import jax
import jax.numpy as jnp

from jaxflash import flash_attention

LENGTH, HEADS, HEAD_DIM = 512, 8, 32


def one_head(query, key, value, scale=None):
    """Causal attention of one head, all arrays `[length, H]`."""
    arrays = (array[:, None] for array in (query, key, value))
    return flash_attention(*arrays, scale=scale, is_causal=True)[:, 0]


def kernels(function, *arrays):
    """How often a program calls a kernel."""
    return jax.jit(function).lower(*arrays).as_text().count("@jaxflash_forward")


def largest_difference(one, other):
    return jnp.abs(one - other).max().item()


def main():
    query, key, value = jax.random.normal(jax.random.key(0), (3, LENGTH, HEADS, HEAD_DIM))
    by_heads = jax.vmap(one_head, in_axes=1, out_axes=1)
    calls = kernels(by_heads, query, key, value)
    together = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    mapped = largest_difference(by_heads(query, key, value), together)
    print(f"mapped over heads: largest difference {mapped:.1e}")
    print(f"calls of a kernel in its program: {calls}")

    multi_query = jax.vmap(one_head, in_axes=(1, None, None), out_axes=1)
    together = jax.nn.dot_product_attention(query, key[:, :1], value[:, :1], is_causal=True)
    shared = largest_difference(multi_query(query, key[:, 0], value[:, 0]), together)
    print(f"key and value not mapped: largest difference from multi-query attention {shared:.1e}")

    scales = jnp.linspace(0.05, 2, HEADS)
    tempered = jax.vmap(one_head, in_axes=(1, 1, 1, 0), out_axes=1)
    scaled = query * scales[:, None]
    together = jax.nn.dot_product_attention(scaled, key, value, scale=1.0, is_causal=True)
    scaled_apart = largest_difference(tempered(query, key, value, scales), together)
    print(f"a scale for each head: largest difference from scaled queries {scaled_apart:.1e}")
    gradient = jax.grad(lambda scales: tempered(query, key, value, scales).std())(scales)
    print(f"gradient of the scales: {gradient.round(5)}")
    return {"mapped": mapped, "shared": shared, "scales": scaled_apart, "calls": calls}


if __name__ == "__main__":
    # No options but --help.
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
