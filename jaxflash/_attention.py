"""The public function: checks its arguments, and makes operands and static config of them."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxflash import _dropout, _integers, _modules, _primitives
from jaxflash import _validation as validation
from jaxflash._operands import FORWARD_OPERANDS, Config, Operands, compute_dtype

WindowSize = int | tuple[int | None, int | None] | None
Implementation = Literal["native", "xla"] | None


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: WindowSize = None,
    query_offset: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    deterministic_gradients: bool = False,
    return_residual: Literal[False] = False,
    implementation: Implementation = None,
) -> jax.Array: ...


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: WindowSize = None,
    query_offset: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    deterministic_gradients: bool = False,
    return_residual: Literal[True],
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]: ...


def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: WindowSize = None,
    query_offset: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    deterministic_gradients: bool = False,
    return_residual: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention in O(B*N*T) memory beyond inputs and outputs.

    Takes the arguments of `jax.nn.dot_product_attention` with the same meaning (but for
    `implementation`), and more. For query i, key j of one batch row and head:

        logits_ij = soft_cap(scale * query_i . key_j) + bias_ij
        output_i = sum_j softmax_j(logits_ij, over visible j, and the sink) * value_j

    Letters: B batch, T query length, S key length, N query heads, K key/value heads, H query/key
    head dim, Hv value head dim. Without the batch axis of query, key and value (`[T, N, H]`,
    `[S, K, H]`) every other argument loses its B too: lengths and offset are scalars, segment ids
    `[T]` and `[S]`, bias and mask have 3 axes.

    A key is visible to a query where all of mask, causality, window, lengths and segment ids allow
    it, and the bias is not -inf. A query that sees no key, or is at or past its length, gives
    output 0 and log-sum-exp -inf (with `sinks` and no key in sight: the sink), and contributes
    exactly 0 to every gradient. What lies past a length, NaN included, reaches no result.

    Softmax and sums are in float32 (float64 for float64). float32 inputs give float32 accuracy,
    unless `jax_default_matmul_precision` asks for less.

    It can be differentiated in both modes and any number of times (higher derivatives, and forward
    mode, run the `"xla"` implementation), with respect to query, key, value, bias, scale and sinks.
    Under `jax.checkpoint`, `save_only_these_names("flash_attention_output", "flash_attention_lse")`
    keeps what the backward pass needs.

    Args:
      query: `[B, T, N, H]`; bfloat16, float16, float32 or float64 (float64 on CPU and `"xla"`).
        H from 1 to 256.
      key: `[B, S, K, H]` in the query's dtype. N must be a multiple of K: query head n uses
        key/value head n // (N / K), which is grouped-query attention, arXiv:2305.13245.
      value: `[B, S, K, Hv]` in the query's dtype. Hv from 1 to 256, need not equal H.
      bias: 4 axes broadcastable to `[B, N, T, S]`, any floating dtype; added to the scaled, capped
        logits. Its gradient has its own shape and dtype. Default: none.
      mask: bool, 4 axes broadcastable to `[B, N, T, S]`, True = visible. Default: all visible.
      scale: real scalar, may be traced, is then differentiable. Default: 1 / sqrt(H).
      is_causal: whether a key j is visible only where `j <= i + query_offset`.
      query_seq_lengths: integers `[B]`; queries at or past the length don't exist. Values beyond T
        count as T, negative ones as 0. Default: T.
      key_value_seq_lengths: integers `[B]`; the same for keys and S.
      local_window_size: a key j is visible only where
        `i + query_offset - left <= j <= i + query_offset + right`; (left, right), or one int for
        both; static ints >= 0, or None for unlimited. Default: unlimited.
      query_offset: integer scalar or `[B]`, any sign: the position of query 0 on the key axis.
        Default 0 aligns causality and window at the top left; `S - T` at the bottom right.
      query_segment_ids: integers `[B, T]`, any values; a key is visible only where the ids are
        equal. Together with `key_value_segment_ids`. Default: one segment.
      key_value_segment_ids: integers `[B, S]`.
      logits_soft_cap: static number > 0: `cap * tanh(logit / cap)` replaces the scaled logits,
        arXiv:2408.00118. Default: none.
      sinks: floating `[N]`, one more logit a head, in the softmax's denominator only,
        arXiv:2309.17453. Default: none.
      dropout_rate: static number in [0, 1): rate at which probabilities are dropped; the others are
        scaled up by 1 / (1 - rate). The rate is rounded to a multiple of 2^-16.
      dropout_key: JAX PRNG key, needed where the rate is above 0. What is dropped depends on the
        key, the batch index, the head and the positions of query and key, and on nothing else.
      deterministic_gradients: whether gradients must be bitwise equal from run to run.
      return_residual: whether to return the log-sum-exp also.
      implementation: `"native"`: compiled kernels. `"xla"`: JAX operations, on every platform.
        None: native where there are kernels for it on the platform that the program is lowered for,
        else xla, with one warning that names the reason.

    Returns:
      The output `[B, T, N, Hv]` in the query's dtype. With `return_residual` a tuple of it and the
      log-sum-exp of the logits, natural logarithm, float32 `[B, T, N]`, which includes the sink,
      never dropout, and is differentiable.

    Raises:
      TypeError: an argument has the wrong kind or dtype.
      ValueError: an argument has the wrong shape or value, or another one is missing. Both name the
        argument, what was expected and what came, and are raised while tracing.
      NotImplementedError: `implementation="native"`, and there are no kernels for the platform, or
        they can't do what is asked for. CUDA kernels have no float64, and no gradient of a
        broadcast bias with `deterministic_gradients`.

    Example:
      >>> import jax
      >>> from jaxflash import flash_attention
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1024, 8, 64), jax.numpy.bfloat16)
      >>> flash_attention(q, k, v, is_causal=True, local_window_size=(256, None)).shape
      (2, 1024, 8, 64)

    Sources: FlashAttention, arXiv:2205.14135 (tiling and recomputation) and FlashAttention-2,
    arXiv:2307.08691 (log-sum-exp as the residual); online softmax, arXiv:1805.02867; dropout bits
    by Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
    """
    query = validation.as_array("query", query)
    key = validation.as_array("key", key)
    value = validation.as_array("value", value)
    validation.check_attention_shapes(query, key, value)
    deterministic_gradients = validation.check_flag(
        "deterministic_gradients", deterministic_gradients
    )
    return_residual = validation.check_flag("return_residual", return_residual)
    is_causal = validation.check_flag("is_causal", is_causal)
    window_left, window_right = validation.check_window(local_window_size)
    rate = validation.check_dropout(dropout_rate, dropout_key)
    threshold = _dropout.threshold_of(rate)
    validation.check_implementation(implementation)
    if implementation == "native":
        _modules.check_available()

    batch, heads = query.shape[:-3], query.shape[-2]
    operands = {"query": query, "key": key, "value": value}
    operands |= _pairwise_operands(bias, mask, query, key)
    operands |= _head_operands(scale, sinks, query)
    operands |= _length_operands(query_seq_lengths, key_value_seq_lengths, query, key)
    operands |= _offset_operand(query_offset, batch)
    operands |= _segment_operands(query_segment_ids, key_value_segment_ids, query, key)
    if threshold and dropout_key is not None:
        operands["dropout_stream"] = _dropout.stream(dropout_key, batch, heads)

    config = Config(
        operands=tuple(name for name in FORWARD_OPERANDS if name in operands),
        window_left=window_left,
        window_right=0 if is_causal else window_right,
        soft_cap=validation.check_soft_cap(logits_soft_cap, query.dtype),
        dropout_threshold=threshold,
        deterministic_gradients=deterministic_gradients,
        implementation=implementation,
        precision=_matmul_precision(query.dtype),
    )
    output, logit_max, log_sum = _primitives.attention(
        config, [operands[name] for name in config.operands]
    )
    if not return_residual:
        return output
    return output, (logit_max + log_sum).astype(jnp.float32)


def _pairwise_operands(bias: Any, mask: Any, query: jax.Array, key: jax.Array) -> Operands:
    """Operands bias and mask."""
    shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    operands = {}
    if bias is not None:
        bias = validation.as_array("bias", bias)
        validation.check_bias_dtype(bias)
        validation.check_pairwise("bias", bias, shape)
        # The kernels know the query's dtypes only.
        known = bias.dtype in validation.QUERY_DTYPES
        operands["bias"] = bias if known else bias.astype(jnp.float32)
    if mask is not None:
        mask = validation.as_array("mask", mask)
        validation.check_mask_dtype(mask)
        validation.check_pairwise("mask", mask, shape)
        operands["mask"] = mask
    return operands


def _head_operands(scale: Any, sinks: Any, query: jax.Array) -> Operands:
    """Operands sinks and scale, in the compute dtype."""
    batch, heads, dtype = query.shape[:-3], query.shape[-2], compute_dtype(query.dtype)
    operands = {}
    if sinks is not None:
        sinks = validation.as_array("sinks", sinks)
        validation.check_sinks(sinks, heads)
        operands["sinks"] = _with_batch_axes(sinks.astype(dtype), batch)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    validation.check_scale(scale)
    operands["scale"] = _with_batch_axes(jnp.asarray(scale, dtype), batch)
    return operands


def _length_operands(
    query_lengths: Any, key_lengths: Any, query: jax.Array, key: jax.Array
) -> Operands:
    """Operands query_lengths and key_value_lengths, clipped to the axes."""
    operands = {}
    for name, argument, lengths, array in (
        ("query_lengths", "query_seq_lengths", query_lengths, query),
        ("key_value_lengths", "key_value_seq_lengths", key_lengths, key),
    ):
        if lengths is not None:
            lengths = validation.as_integers(argument, lengths)
            validation.check_per_batch(argument, lengths.shape, query.shape[:-3])
            operands[name] = _integers.clipped(lengths, 0, array.shape[-3])
    return operands


def _offset_operand(query_offset: Any, batch: tuple[int, ...]) -> Operands:
    """Operand query_offset of a scalar or, where there is a batch, `[B]`."""
    if query_offset is None:
        return {}
    offset = validation.as_integers("query_offset", query_offset)
    if np.ndim(offset):
        validation.check_per_batch("query_offset", offset.shape, batch)
        return {"query_offset": _integers.clipped_offset(offset)}
    return {"query_offset": _with_batch_axes(_integers.clipped_offset(offset), batch)}


def _segment_operands(query_ids: Any, key_ids: Any, query: jax.Array, key: jax.Array) -> Operands:
    """Operands of the segment ids."""
    if query_ids is None and key_ids is None:
        return {}
    validation.check_both(query_segment_ids=query_ids, key_value_segment_ids=key_ids)
    query_ids = validation.as_integers("query_segment_ids", query_ids)
    key_ids = validation.as_integers("key_value_segment_ids", key_ids)
    validation.check_segment_ids("query_segment_ids", query_ids.shape, query.shape, "T")
    validation.check_segment_ids("key_value_segment_ids", key_ids.shape, key.shape, "S")
    query_ids, key_ids = _integers.segment_ids(query_ids, key_ids)
    return {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}


def _with_batch_axes(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Puts as many axes of size 1 in front as there are batch axes."""
    return array.reshape(*[1] * len(batch), *array.shape)


def _matmul_precision(dtype: Any) -> str:
    """The precision of matrix products: what the user configured, or all that the dtype has."""
    # The documented flag, which is an attribute only while running.
    configured = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if configured is not None:
        return str(configured)
    return "highest" if dtype in (jnp.float32, jnp.float64) else "default"
