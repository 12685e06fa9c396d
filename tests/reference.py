"""Dense O(T*S) attention in NumPy: what `jaxflash.flash_attention` has to compute.

Written from the documentation of the interface alone; imports nothing of jaxflash. The same
formulas run at two precisions: `exact` (float64, or long double for float64 inputs) says what is
right, and `working` (float32 arithmetic, with probabilities and results rounded to the input dtype)
says how far from it an honest implementation may be.
"""

import dataclasses
import math
import types

import jax
import numpy as np

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)


@dataclasses.dataclass(frozen=True)
class Precision:
    """Arithmetic happens in `compute`; probabilities and results are rounded to `storage`.

    `jitter` of 1 or -1 moves each logit up or down by an ulp, neighbours in size in opposite
    directions: about the worst that another order of the same sums does.
    """

    compute: np.dtype
    storage: np.dtype
    jitter: int = 0

    def store(self, x):
        return x.astype(self.storage).astype(self.compute)


def exact(dtype) -> Precision:
    """Much more precise than anything that takes inputs of `dtype`."""
    wide = np.dtype(np.longdouble if np.dtype(dtype) == np.float64 else np.float64)
    return Precision(wide, wide)


def working(dtype, jitter=0) -> Precision:
    """What a flash kernel, or `jax.nn.dot_product_attention`, does with inputs of `dtype`."""
    compute = np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
    return Precision(compute, np.dtype(dtype), jitter)


def philox(counter, key, rounds=7):
    """Philox4x32 (Salmon et al., SC11): four counter words, two key words -> four words."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = (np.asarray(k, np.uint64) for k in key)
    m0, m1 = (np.uint64(m) for m in _PHILOX_MULTIPLIERS)
    for _ in range(rounds):
        p0, p1 = m0 * c0, m1 * c2
        high = np.uint64(32)
        c0, c1, c2, c3 = (p1 >> high) ^ c1 ^ k0, p1 & _WORD, (p0 >> high) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (
            (k0 + np.uint64(_PHILOX_KEY_STEPS[0])) & _WORD,
            (k1 + np.uint64(_PHILOX_KEY_STEPS[1])) & _WORD,
        )
    return c0, c1, c2, c3


def dropout_factors(dropout_key, rate, batch, heads, queries, keys):
    """`[B,N,T,S]`: 0 where a probability is dropped, else the factor that keeps the mean."""
    threshold = min(65535, round(rate * 65536))
    key = np.asarray(jax.random.bits(dropout_key, (2,), "uint32"), np.uint64)
    b, n, i, j = np.ogrid[:batch, :heads, :queries, :keys]
    counter = ((i >> 4) * 8 + (i & 7), (j >> 4) * 4 + ((j & 7) >> 1), b, n)
    words = np.stack(np.broadcast_arrays(*philox(counter, key)))
    lane = ((i >> 3) & 1) * 4 + ((j >> 3) & 1) * 2 + (j & 1)
    word = np.take_along_axis(words, np.broadcast_to(lane >> 1, words.shape[1:])[None], axis=0)[0]
    draw = (word >> (16 * (lane & 1)).astype(np.uint64)) & np.uint64(0xFFFF)
    return np.where(draw >= threshold, 65536 / (65536 - threshold), 0.0)


def visibility(
    shape,
    *,
    mask=None,
    bias=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_offset=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
):
    """Which query sees which key: bool `[B,N,T,S]`; also which queries exist: bool `[B,T]`."""
    batch, _, queries, keys = shape
    i = np.arange(queries)[None, None, :, None]
    j = np.arange(keys)[None, None, None, :]
    exists = np.ones((batch, queries), bool)
    visible = np.ones(shape, bool)
    if mask is not None:
        visible &= np.asarray(mask)
    if bias is not None:
        visible &= np.asarray(bias, np.float64) != -np.inf
    if query_seq_lengths is not None:
        exists = np.arange(queries) < np.asarray(query_seq_lengths, np.int64)[:, None]
        visible &= exists[:, None, :, None]
    if key_value_seq_lengths is not None:
        visible &= j < np.asarray(key_value_seq_lengths, np.int64)[:, None, None, None]
    offset = 0 if query_offset is None else query_offset
    position = i + np.broadcast_to(np.asarray(offset, np.int64), (batch,))[:, None, None, None]
    if is_causal:
        visible &= j <= position
    if local_window_size is not None:
        pair = np.ndim(local_window_size) == 1
        left, right = local_window_size if pair else (local_window_size, local_window_size)
        visible &= True if left is None else j >= position - left
        visible &= True if right is None else j <= position + right
    if query_segment_ids is not None:
        rows = np.asarray(query_segment_ids)[:, None, :, None]
        visible &= rows == np.asarray(key_value_segment_ids)[:, None, None, :]
    return visible, exists


def attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    logits_soft_cap=None,
    sinks=None,
    dropout_rate=0.0,
    dropout_key=None,
    output_cotangent=None,
    lse_cotangent=None,
    precision=None,
    **rules,
):
    """Attention and, if cotangents are given, its gradients.

    Arguments as in `jaxflash.flash_attention`; `precision` is `exact` by default. Returns a dict of
    arrays in the compute dtype of the precision: "output", "lse", "visible" (bool `[B,N,T,S]`),
    with cotangents also "d_query", "d_key", "d_value", and "d_bias", "d_sinks", "d_scale" where
    these arguments are given. Two more entries are dicts by these names: "magnitude", the largest
    sum of absolute values of the terms a result is added up from (of gradients at `exact` only);
    "rows", for a gradient that is summed over rows, its part from each row, `[B,N,T,S or 1]`, and
    the axes to sum over.
    """
    arguments = dict(
        bias=bias,
        mask=mask,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        precision=precision,
        **rules,
    )
    cotangents = {"output_cotangent": output_cotangent, "lse_cotangent": lse_cotangent}
    if np.ndim(query) == 3:
        return _unbatched(query, key, value, **arguments, **cotangents)
    x = _forward(*map(np.asarray, (query, key, value)), **arguments)
    is_exact = x.precision == exact(np.asarray(query).dtype)
    result = {
        "output": x.output.transpose(0, 2, 1, 3),
        "lse": x.lse[..., 0].transpose(0, 2, 1),
        "visible": x.visible,
        "magnitude": {
            "output": np.abs(x.v).max(initial=0),
            "lse": np.abs(x.logits[x.visible]).max(initial=1),
        },
        "rows": {},
    }
    if output_cotangent is None:
        return result
    d_output = np.asarray(output_cotangent).astype(x.output.dtype).transpose(0, 2, 1, 3)
    d_lse = np.asarray(lse_cotangent).astype(x.output.dtype).transpose(0, 2, 1)[..., None]
    d_output, d_lse = np.where(x.alive, d_output, 0), np.where(x.alive, d_lse, 0)
    gradients = _backward(x, d_output, d_lse, sign=-1)
    magnitudes = {}
    if is_exact:
        magnitudes = _backward(_absolute(x), np.abs(d_output), np.abs(d_lse), sign=1)
    given = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks}
    given["scale"] = scale
    for name in (n for n in gradients if given[n] is not None):
        result["d_" + name] = _to_argument(name, gradients[name], np.shape(given[name]))
        if is_exact:
            magnitude = _to_argument(name, magnitudes[name], np.shape(given[name]))
            result["magnitude"]["d_" + name] = magnitude.max(initial=0)
        if name in ("bias", "sinks", "scale"):
            result["rows"]["d_" + name] = _rows(name, gradients[name], np.shape(given[name]))
    return result


def _forward(
    query, key, value, *, bias, mask, scale, logits_soft_cap, sinks, dropout_rate, dropout_key,
    precision, **rules,
):  # fmt: skip
    """All numbers of the forward pass, heads before rows: `[B,N,T,S]` and the like."""
    x = types.SimpleNamespace(precision=precision or exact(query.dtype))
    compute = x.precision.compute.type
    batch, queries, heads, depth = query.shape
    keys, kv_heads = key.shape[1:3]
    shape = (batch, heads, queries, keys)
    x.visible, exists = visibility(shape, mask=mask, bias=bias, **rules)
    lengths = rules.get("key_value_seq_lengths")
    key_exists = visibility((batch, 1, 1, keys), key_value_seq_lengths=lengths)[0][:, 0, 0]
    x.q = np.where(exists[..., None, None], query, 0).astype(compute).transpose(0, 2, 1, 3)
    x.k, x.v = (
        np.where(key_exists[..., None, None], a, 0).astype(compute).transpose(0, 2, 1, 3)
        for a in (key, value)
    )
    x.k, x.v = (a.repeat(heads // kv_heads, axis=1) for a in (x.k, x.v))

    x.factor = compute(1 / math.sqrt(depth) if scale is None else np.asarray(scale).astype(compute))
    x.products = x.q @ x.k.swapaxes(-1, -2)
    logits = x.factor * x.products
    if x.precision.jitter:
        order = np.argsort(np.where(x.visible, logits, -np.inf), axis=-1)
        signs = x.precision.jitter * (-1) ** np.argsort(order, axis=-1).astype(compute)
        logits = logits * (1 + np.finfo(compute).eps * signs)
    x.cap_slope = compute(1)
    if logits_soft_cap is not None:
        bent = np.tanh(logits / compute(logits_soft_cap))
        logits, x.cap_slope = compute(logits_soft_cap) * bent, 1 - bent * bent
    if bias is not None:
        logits = logits + np.where(x.visible, np.asarray(bias).astype(compute), 0)
    x.logits = np.where(x.visible, logits, -np.inf)
    sink = np.full((1, 1, 1, 1), -np.inf, compute)
    if sinks is not None:
        sink = np.asarray(sinks).astype(compute)[:, None, None]
        sink = np.where(exists[:, None, :, None], sink, -np.inf)

    top = np.maximum(x.logits.max(-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(x.logits - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sink - top)
    x.alive = (total > 0) & exists[:, None, :, None]
    total = np.where(total > 0, total, 1)
    x.probabilities = weights / total
    x.sink_probabilities = np.exp(sink - top) / total
    x.lse = np.where(x.alive, top + np.log(total), -np.inf)
    x.kept = compute(1)
    if dropout_rate:
        x.kept = dropout_factors(dropout_key, dropout_rate, *shape).astype(compute)
    x.dropped = x.precision.store(x.probabilities * x.kept)
    x.output = x.precision.store(x.dropped @ x.v)
    return x


def _absolute(x):
    """The forward numbers with absolute values for those that have a sign."""
    signed = {name: np.abs(getattr(x, name)) for name in ("q", "k", "v", "output", "factor")}
    signed["products"] = signed["q"] @ signed["k"].swapaxes(-1, -2)
    return types.SimpleNamespace(**{**vars(x), **signed})


def _backward(x, d_output, d_lse, sign):
    """Gradients per query head. Of absolute values, with sign=1: the sums of absolute terms."""
    delta = (d_output * x.output).sum(-1, keepdims=True) + sign * d_lse
    d_dropped = d_output @ x.v.swapaxes(-1, -2)
    d_bias = x.probabilities * (d_dropped * x.kept + sign * delta)
    d_scaled = d_bias * x.cap_slope
    d_products = x.precision.store(d_scaled)
    return {
        "query": x.factor * (d_products @ x.k),
        "key": x.factor * (d_products.swapaxes(-1, -2) @ x.q),
        "value": x.dropped.swapaxes(-1, -2) @ d_output,
        "bias": d_bias,
        "sinks": sign * (x.sink_probabilities * delta),
        "scale": d_scaled * x.products,
    }


def _to_argument(name, gradient, shape):
    """Sums a gradient per query head to the shape of the argument it belongs to."""
    if name in ("query", "key", "value"):
        batch, heads, rows, depth = gradient.shape
        grouped = gradient.reshape(batch, shape[2], heads // shape[2], rows, depth).sum(2)
        return grouped.transpose(0, 2, 1, 3)
    return gradient.sum(_summed_axes(name, gradient, shape), keepdims=True).reshape(shape)


def _summed_axes(name, gradient, shape):
    full = {"scale": (1, 1, 1, 1), "sinks": (1, *shape, 1, 1), "bias": shape}[name]
    return tuple(a for a in range(4) if full[a] != gradient.shape[a])


def _rows(name, gradient, shape):
    """The part of each row in a gradient, and the axes that are still to be summed over."""
    axes = _summed_axes(name, gradient, shape)
    if 3 in axes:
        gradient = gradient.sum(3, keepdims=True)
    return gradient, tuple(a for a in axes if a != 3)


_PER_BATCH = (
    "bias",
    "mask",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_offset",
    "query_segment_ids",
    "key_value_segment_ids",
    "output_cotangent",
    "lse_cotangent",
)


def _unbatched(query, key, value, **arguments):
    """3-D inputs mean what a batch of one means."""
    for name in _PER_BATCH:
        if arguments.get(name) is not None:
            arguments[name] = np.asarray(arguments[name])[None]
    result = attention(*(np.asarray(x)[None] for x in (query, key, value)), **arguments)
    batched = ("output", "lse", "visible", "d_query", "d_key", "d_value", "d_bias")
    return {n: x[0] if n in batched else x for n, x in result.items()}
