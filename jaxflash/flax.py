"""Attention of Flax modules: `attention_fn` of `nnx.MultiHeadAttention` and its Linen twin."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxflash._attention import flash_attention
from jaxflash._dropout import SharedKey

try:
    from flax.nnx.nn import dtypes
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flax":
        raise
    raise ModuleNotFoundError("jaxflash.flax needs Flax: pip install flax") from error

__all__ = ["attention_fn"]


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    *,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    **options: Any,
) -> jax.Array:
    """Flax's `dot_product_attention` in linear memory, for its multi-head attention modules.

    It takes the arguments of `flax.nnx.dot_product_attention` and of
    `flax.linen.dot_product_attention`, and gives what they give:

      >>> from flax import nnx
      >>> from jaxflash.flax import attention_fn
      >>> layer = nnx.MultiHeadAttention(8, 512, decode=False, attention_fn=attention_fn,
      ...                                rngs=nnx.Rngs(0))

    and `linen.MultiHeadDotProductAttention(8, attention_fn=attention_fn)` alike. Letters: T query
    length, S key length, N query heads, K key/value heads, H head dim, Hv value head dim.

    What differs:

    - A query that sees no key gives 0, where Flax gives the mean of all values.
    - Dropout draws another mask from the same key. Its rate (to a multiple of 2^-16), the scaling
      of what is kept, and what `broadcast_dropout` shares are the same, and so is that a key always
      draws the same mask. The mask is never in memory.
    - Softmax and sums are in float32 at least, and so is the scaling of the query.
    - Attention weights are never formed, so `sow_weights=True` raises.

    Args:
      query: `[batch..., T, N, H]`, any number of batch axes, H up to 256. Query, key and value are
        promoted to one dtype: bfloat16, float16, float32 or float64.
      key: `[batch..., S, K, H]`; N must be a multiple of K.
      value: `[batch..., S, K, Hv]`.
      bias: floating, broadcastable to `[batch..., N, T, S]`, added to the logits. Default: none.
      mask: broadcastable to `[batch..., N, T, S]`, any dtype, zero = invisible. Default: all
        visible.
      broadcast_dropout: whether all batch rows and heads share one dropout mask `[T, S]`.
      dropout_rng: JAX PRNG key, needed where there is dropout.
      dropout_rate: static number in [0, 1).
      deterministic: whether there is no dropout, whatever the rate.
      dtype: dtype of the computation. Default: that which query, key and value promote to.
      precision: of the matrix products: a `jax.lax.Precision` or its name, or two that are the
        same. Default: that of `flash_attention`, float32 accuracy for float32.
      module: must be None; a module to sow attention weights into.
      promote_dtype: function that promotes (query, key, value), as in NNX.
      is_causal: whether a key j is visible to query i only where `j <= i`. NNX passes it on; for
        Linen, `functools.partial(attention_fn, is_causal=True)` spares the mask of a causal layer
        that doesn't decode.
      force_fp32_for_softmax: whether the output is float32 at least, as Linen's is then; the
        softmax always is.
      einsum_dot_general: must be None, and so must the next two: products are the kernels' own.
      qk_attn_weights_einsum: must be None.
      attn_weights_value_einsum: must be None.
      **options: further arguments of `flash_attention` but `return_residual`, for instance
        `functools.partial(attention_fn, local_window_size=(255, 0))`. Where they have a batch axis,
        it is that of all batch axes folded into one.

    Returns:
      The output `[batch..., T, N, Hv]`.

    Raises:
      NotImplementedError: one of module, einsum_dot_general, qk_attn_weights_einsum,
        attn_weights_value_einsum or a precision that can't be honoured. The text names it.
      TypeError: an argument has the wrong kind or dtype.
      ValueError: an argument has the wrong shape or value, or dropout has no key.
    """
    if module is not None:
        raise NotImplementedError(
            "module: expected None (sow_weights=False), because attention weights are never formed "
            f"and can't be sown, got {type(module).__name__}"
        )
    for name, replacement in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if replacement is not None:
            raise NotImplementedError(
                f"{name}: expected None, because products are the kernels' own, got {replacement!r}"
            )
    for name, instead in (("return_residual", "flash_attention"), ("dropout_key", "dropout_rng")):
        if name in options:
            raise TypeError(f"{name}: not an argument of attention_fn; use {instead} instead")
    rate = 0.0 if deterministic else dropout_rate
    if rate and dropout_rng is None:
        raise ValueError(
            f"dropout_rng: expected a JAX PRNG key, because dropout_rate is {rate} and "
            "deterministic is False, got None"
        )
    dropout_key: Any = dropout_rng
    if broadcast_dropout and dropout_rng is not None:
        dropout_key = SharedKey(dropout_rng)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    batch = query.shape[:-3]
    for name, array in (("key", key), ("value", value)):
        if array.shape[:-3] != batch:
            raise ValueError(
                f"{name}: expected the query's batch axes {batch}, got {array.shape[:-3]}, "
                f"shape {array.shape}"
            )
    query, key, value = (_folded(array, batch) for array in (query, key, value))
    pairs = (query.shape[-2], query.shape[-3], key.shape[-3])
    with _matmul_precision(precision):
        output = flash_attention(
            query,
            key,
            value,
            None if bias is None else _folded_pairs("bias", jnp.asarray(bias), batch, pairs),
            None
            if mask is None
            else _folded_pairs("mask", jnp.asarray(mask).astype(bool), batch, pairs),
            is_causal=is_causal,
            dropout_rate=rate,
            dropout_key=dropout_key if rate else None,
            **options,
        )
    output = output.reshape(*batch, *output.shape[-3:])
    if force_fp32_for_softmax:
        return output.astype(jnp.promote_types(output.dtype, jnp.float32))
    return output


def _folded(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """An array whose leading axes broadcast to those of the batch, with one axis in their place.

    With fewer than two batch axes nothing is folded.
    """
    array = array.reshape(*[1] * (len(batch) + 3 - array.ndim), *array.shape)
    own, rest = array.shape[:-3], array.shape[-3:]
    if len(batch) < 2:
        return array
    if math.prod(own) != 1:
        own = batch
        array = jnp.broadcast_to(array, (*own, *rest))
    return array.reshape(math.prod(own), *rest)


def _folded_pairs(
    name: str, array: jax.Array, batch: tuple[int, ...], pairs: tuple[int, int, int]
) -> jax.Array:
    """A bias or a mask, folded, that must broadcast to `[*batch, *pairs]`; `pairs` is N, T, S."""
    shape = (*batch, *pairs)
    sizes = (1,) * (len(shape) - array.ndim) + array.shape
    if len(sizes) > len(shape) or any(
        size not in (1, full) for size, full in zip(sizes, shape, strict=True)
    ):
        raise ValueError(
            f"{name}: expected a shape broadcastable to [batch..., N, T, S] = {shape}, "
            f"got {array.shape}"
        )
    return _folded(array, batch)


def _matmul_precision(precision: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which products have a precision as `jnp.einsum` takes it."""
    if precision is None:
        return contextlib.nullcontext()
    pair = precision if isinstance(precision, tuple) else (precision,)
    try:
        (level,) = {lax.Precision(side) for side in pair}
    except ValueError as error:
        raise NotImplementedError(
            "precision: expected None, a jax.lax.Precision or its name, or two that are the same, "
            f"got {precision!r}"
        ) from error
    return jax.default_matmul_precision(level.name.lower())
