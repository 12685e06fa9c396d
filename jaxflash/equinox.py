"""Equinox's multi-head attention layer, computed by `flash_attention`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxflash import _validation as validation
from jaxflash._attention import Implementation, WindowSize, flash_attention

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "equinox":
        raise
    raise ModuleNotFoundError("jaxflash.equinox needs Equinox: pip install equinox") from error

__all__ = ["MultiheadAttention"]

ProcessHeads = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention` in linear memory, with the same weights.

    It has the constructor, the call and the leaves of Equinox's, of which it is a subclass: a
    checkpoint of one, written by `eqx.tree_serialise_leaves`, loads into the other. More than
    Equinox's it has grouped-query attention, causality, windows, and batched calls.

      >>> import jax
      >>> from jaxflash.equinox import MultiheadAttention
      >>> layer = MultiheadAttention(8, 512, is_causal=True, key=jax.random.key(0))

    Letters: B batch, T query length, S key length, N `num_heads`, K `num_key_value_heads`.

    What differs:

    - A query that sees no key gives the output projection of 0, where Equinox has the mean of all
      values.
    - Dropout draws another mask from the same key. Its rate (to a multiple of 2^-16), the scaling
      of what is kept and the independence of the heads are the same, and so is that a key always
      draws the same mask.
    - Softmax and sums are in float32 at least, and so is the scaling of the query.
    - `qk_size` and `vo_size` are at most 256, a mask is boolean, and the dropout rate is no array.
    """

    num_key_value_heads: int = eqx.field(static=True)
    is_causal: bool = eqx.field(static=True)
    local_window_size: WindowSize = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: Any = None,
        *,
        num_key_value_heads: int | None = None,
        is_causal: bool = False,
        local_window_size: WindowSize = None,
        implementation: Implementation = None,
        key: jax.Array,
    ):
        """Draws the weights that Equinox draws from the same key, where K = N.

        Args:
          num_heads: number of query heads N.
          query_size: channels of the query.
          key_size: channels of the key. Default: `query_size`.
          value_size: channels of the value. Default: `query_size`.
          output_size: channels of the output. Default: `query_size`.
          qk_size: channels of a query and key head. Default: `query_size // num_heads`.
          vo_size: channels of a value head. Default: `query_size // num_heads`.
          use_query_bias: whether the query's projection has a bias.
          use_key_bias: whether the key's has.
          use_value_bias: whether the value's has.
          use_output_bias: whether the output's has.
          dropout_p: rate of dropout of attention weights, in [0, 1).
          inference: whether dropout is off; `eqx.nn.inference_mode` changes it.
          dtype: dtype of the weights. Default: float32, float64 in 64-bit mode.
          num_key_value_heads: number of key and value heads K, of which N is a multiple: query head
            n uses head n // (N / K). Default: `num_heads`. Otherwise the key's and the value's
            projection have fewer rows than Equinox's.
          is_causal: whether a key j is visible to query i only where `j <= i`.
          local_window_size: a key j is visible only where `i - left <= j <= i + right`; (left,
            right), or one int for both; ints >= 0, or None for unlimited. Default: unlimited.
          implementation: that of `flash_attention`.
          key: JAX PRNG key of the weights.

        Raises:
          TypeError: an argument has the wrong kind, or `dtype` is none that attention computes in.
          ValueError: an argument has the wrong value: a size below 1, a head of more than 256
            channels, `num_heads` that is not a multiple of `num_key_value_heads`.
        """
        kv_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        _check_sizes(
            num_heads,
            kv_heads,
            query_size,
            key_size=key_size,
            value_size=value_size,
            output_size=output_size,
            qk_size=qk_size,
            vo_size=vo_size,
        )
        validation.check_rate("dropout_p", dropout_p)
        validation.check_flag("inference", inference)
        if dtype is not None:
            validation.check_dtype("dtype", dtype)
        validation.check_flag("is_causal", is_causal)
        validation.check_window(local_window_size)
        validation.check_implementation(implementation)
        super().__init__(
            num_heads,
            query_size,
            key_size,
            value_size,
            output_size,
            qk_size,
            vo_size,
            use_query_bias,
            use_key_bias,
            use_value_bias,
            use_output_bias,
            dropout_p,
            inference,
            dtype,
            key=key,
        )
        if kv_heads != num_heads:
            _, key_key, value_key, _ = jax.random.split(key, 4)
            self.key_proj = eqx.nn.Linear(
                self.key_size, kv_heads * self.qk_size, use_key_bias, dtype, key=key_key
            )
            self.value_proj = eqx.nn.Linear(
                self.value_size, kv_heads * self.vo_size, use_value_bias, dtype, key=value_key
            )
        self.num_key_value_heads = kv_heads
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.implementation = implementation

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: ProcessHeads | None = None,
    ) -> jax.Array:
        """Attention of one sequence, or of each in a batch.

        A batched call is `jax.vmap` of the call, with `jax.random.split(key, B)` for a key.

        Args:
          query: `[T, query_size]` or `[B, T, query_size]`.
          key_: `[S, key_size]` or `[B, S, key_size]`.
          value: `[S, value_size]` or `[B, S, value_size]`.
          mask: bool, True = visible: `[T, S]` or `[N, T, S]`, in a batched call `[T, S]` for every
            sequence or `[B, N, T, S]`; B and N may be 1. Default: all visible.
          key: JAX PRNG key, needed where there is dropout.
          inference: whether dropout is off. Default: as constructed.
          deterministic: deprecated name of `inference`.
          process_heads: function of the projected query `[T, N, qk_size]`, key `[S, K, qk_size]`
            and value `[S, K, vo_size]` of one sequence, that returns three arrays of these shapes;
            for instance, it rotates query and key (`eqx.nn.RotaryPositionalEmbedding`).

        Returns:
          The output `[T, output_size]` or `[B, T, output_size]`.

        Raises:
          TypeError: an argument has the wrong kind or dtype.
          ValueError: an argument has the wrong shape, or `process_heads` changes a shape.
          RuntimeError: there is dropout, and no key.
        """
        if deterministic is not None:
            inference = deterministic
            warnings.warn(
                "MultiheadAttention()(deterministic=...) is deprecated in favour of "
                "MultiheadAttention()(inference=...)",
                stacklevel=2,
            )
        if inference is None:
            inference = self.dropout.inference
        rate = 0.0 if inference else self.dropout.p
        if rate and key is None:
            raise RuntimeError(
                f"key: expected a JAX PRNG key, because dropout_p is {rate} and inference is "
                "False, got None"
            )
        _check_inputs(query, key_, value, mask)
        attend = functools.partial(self._attend, rate, process_heads)
        if query.ndim == 2:
            return attend(query, key_, value, mask, key)
        if mask is not None and mask.ndim == 4 and mask.shape[0] == 1:
            mask = mask[0]  # for every sequence
        keys = None if key is None else jax.random.split(key, query.shape[0])
        mask_axis = 0 if mask is not None and mask.ndim == 4 else None
        return jax.vmap(attend, (0, 0, 0, mask_axis, 0))(query, key_, value, mask, keys)

    def _attend(
        self,
        rate: float,
        process_heads: ProcessHeads | None,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        """Attention of one sequence, with dropout at a rate."""
        heads = (
            _project(self.query_proj, query, self.num_heads, self.qk_size),
            _project(self.key_proj, key_, self.num_key_value_heads, self.qk_size),
            _project(self.value_proj, value, self.num_key_value_heads, self.vo_size),
        )
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if [x.shape for x in heads] != shapes:
                raise ValueError(
                    f"process_heads: expected shapes {shapes} as given, got "
                    f"{[x.shape for x in heads]}"
                )
        dtype = jnp.result_type(*heads)
        mixed = flash_attention(
            *(x.astype(dtype) for x in heads),
            mask=mask if mask is None or mask.ndim != 2 else mask[None],
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            dropout_rate=rate,
            dropout_key=key if rate else None,
            implementation=self.implementation,
        )
        return jax.vmap(self.output_proj)(
            mixed.reshape(mixed.shape[0], self.num_heads * self.vo_size)
        )


def _check_sizes(
    num_heads: int, num_key_value_heads: int, query_size: int, **others: int | None
) -> None:
    """Checks numbers of heads and sizes against each other; None for those not given."""
    given = {
        "num_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "query_size": query_size,
        **others,
    }
    for name, size in given.items():
        if size is not None:
            validation.check_size(name, size)
    if num_heads % num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads: expected a divisor of num_heads = {num_heads}, "
            f"got {num_key_value_heads}"
        )
    for name in ("qk_size", "vo_size"):
        _check_head_size(name, others[name], query_size, num_heads)


def _check_head_size(name: str, size: int | None, query_size: int, num_heads: int) -> None:
    """Checks the channels of a head, given or by default."""
    default = "" if size is not None else f", the default: query_size {query_size} // {num_heads}"
    size = query_size // num_heads if size is None else size
    if not 1 <= size <= validation.MAX_HEAD_DIM:
        raise ValueError(
            f"{name}: expected from 1 to {validation.MAX_HEAD_DIM}, got {size}{default}"
        )


def _check_inputs(
    query: jax.Array, key_: jax.Array, value: jax.Array, mask: jax.Array | None
) -> None:
    """Checks the axes of a call's arrays, and the batch; the rest is checked by attention."""
    if not query.ndim == key_.ndim == value.ndim or query.ndim not in (2, 3):
        raise ValueError(
            "query, key_, value: expected [length, channels] or [B, length, channels], got "
            f"shapes {query.shape}, {key_.shape}, {value.shape}"
        )
    if query.ndim == 2:
        return
    if not query.shape[0] == key_.shape[0] == value.shape[0]:
        raise ValueError(
            "query, key_, value: expected one batch size, got shapes "
            f"{query.shape}, {key_.shape}, {value.shape}"
        )
    if mask is not None and mask.ndim == 3:
        raise ValueError(
            "mask: expected [T, S] or [B, N, T, S] in a batched call (mask[:, None] where each "
            "sequence has its own, mask[None] where each head has), got shape "
            f"{mask.shape}"
        )


def _project(linear: eqx.nn.Linear, x: jax.Array, heads: int, size: int) -> jax.Array:
    """Maps `[length, channels]` to `[length, heads, size]`."""
    return jax.vmap(linear)(x).reshape(x.shape[0], heads, size)
