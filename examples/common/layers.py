"""Parts of the model without parameters, for any number of batch axes."""

from typing import Any

import jax
import jax.numpy as jnp


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates pairs of features by angles that grow with the position (arXiv 2104.09864).

    Args:
        x: queries or keys `[..., T, N, H]`, H even.
        positions: int `[..., T]`.
    """
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** -(jnp.arange(half) / half)
    angles = positions[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def jax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    implementation: Any,
) -> jax.Array:
    """What `flash_attention` computes in these models, by `jax.nn`, which needs a dense mask.

    Args:
        query: `[..., T, N, H]`.
        key: `[..., T, K, H]`.
        value: `[..., T, K, H]`.
        segment_ids: int `[..., T]`.
        implementation: of `jax.nn.dot_product_attention`, "xla" or "cudnn".
    """
    same_document = segment_ids[..., :, None] == segment_ids[..., None, :]
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=same_document[..., None, :, :],
        is_causal=True,
        implementation=implementation,
    )
