"""`jax.nn.dot_product_attention`'s signature and results, computed by `flash_attention`."""

from __future__ import annotations

from typing import Literal, overload

import jax
from jax import lax
from jax.typing import ArrayLike

from jaxflash import _validation as validation
from jaxflash._attention import Implementation, flash_attention

_IMPLEMENTATIONS: dict[str | None, Implementation] = {None: None, "xla": "xla", "cudnn": "native"}


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax.nn.dot_product_attention` in linear memory: a drop-in by import.

    Signature, shapes and results are those of `jax.nn`; `flash_attention` is the same with more
    arguments. Letters: B batch, T query length, S key length, N query heads, K key/value heads, H
    head dim.

    What differs:

    - A query that sees no key gives output 0, where `jax.nn` gives the mean of all values (or NaN,
      if a bias is -inf). It contributes 0 to every gradient.
    - Its residual, and that of a query at or past its length, is -inf, where `jax.nn` gives a
      number around -2.4e38.
    - What lies past a length, NaN included, reaches no result.
    - float32 inputs give float32 accuracy, on a GPU too, unless `jax_default_matmul_precision` asks
      for less. float64 inputs have their softmax in float64.
    - Head dims are at most 256, window sizes at least 0, and a bias is floating.
    - `is_causal` must be a bool of Python or NumPy, and query, key and value floating.
    - More is accepted: value may have a head dim of its own, lengths any integer dtype, and None is
      an unlimited side of a window.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`; bfloat16, float16, float32 or float64.
      key: `[B, S, K, H]` or `[S, K, H]` in the query's dtype; N must be a multiple of K. Each of
        query, key and value that has 3 axes is taken as a batch of one.
      value: as the key.
      bias: up to 4 axes, broadcastable to `[B, N, T, S]`; added to the scaled logits. Default:
        none.
      mask: bool, up to 4 axes, broadcastable to `[B, N, T, S]`, True = visible. Default: all.
      scale: number. Default: 1 / sqrt(H).
      is_causal: whether key j is visible to query i only where `j <= i`.
      query_seq_lengths: int32 `[B]` (`[1]` for 3 axes), output rows at or past it are 0. Default:
        T.
      key_value_seq_lengths: int32 `[B]` (`[1]` for 3 axes), keys at or past it are invisible.
        Default: S.
      local_window_size: (left, right), or one int for both: key j is visible to query i only where
        `i - left <= j <= i + right`. Default: unlimited.
      implementation: None: jaxflash's kernels where there are any for the platform, else JAX
        operations, with one warning that names the reason. `"cudnn"`, which in `jax.nn` is a fused
        kernel or an error: jaxflash's kernels or an error (cuDNN itself is not called). `"xla"`:
        JAX operations, in linear memory also.
      return_residual: whether to return the log-sum-exp also.

    Returns:
      The output in the query's shape and dtype. With `return_residual` a tuple of it and the
      log-sum-exp of the logits, `[B, T, N]` or `[T, N]`, which as in `jax.nn` has the query's dtype
      and no gradient; that of `flash_attention` is float32 and has one.

    Raises:
      TypeError: an argument has the wrong kind or dtype (`jax.nn`: `ValueError`).
      ValueError: an argument has the wrong shape or value.
      NotImplementedError: `implementation="cudnn"`, and there are no kernels for the platform or
        the dtype.

    Example:
      >>> import jax
      >>> from jaxflash import dot_product_attention  # instead of: from jax.nn import ...
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1024, 8, 64))
      >>> dot_product_attention(q, k, v, is_causal=True).shape
      (2, 1024, 8, 64)
    """
    if implementation not in tuple(_IMPLEMENTATIONS):  # which takes what has no hash
        raise ValueError(f'implementation: expected None, "xla" or "cudnn", got {implementation!r}')
    query = validation.as_array("query", query)
    output, residual = flash_attention(
        _with_four_axes("query", query),
        _with_four_axes("key", key),
        _with_four_axes("value", value),
        None if bias is None else _with_four_axes("bias", bias),
        None if mask is None else _with_four_axes("mask", mask),
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        return_residual=True,
        implementation=_IMPLEMENTATIONS[implementation],
    )
    rows = query.shape[:-1]
    output = output.reshape(*rows, output.shape[-1])
    if not return_residual:
        return output
    return output, lax.stop_gradient(residual.astype(query.dtype)).reshape(rows)


def _with_four_axes(name: str, value: ArrayLike) -> jax.Array:
    """Puts axes of size 1 in front."""
    array = validation.as_array(name, value)
    return array.reshape(*[1] * (4 - array.ndim), *array.shape)
