"""Integer arguments of any dtype as the int32 operands of the primitives, without truncation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxflash._operands import is_static

_INT32 = np.iinfo(np.int32)
_OFFSET_LIMIT = 2**30


def _namespace(array: Any) -> ModuleType:
    """NumPy for NumPy arrays, whose 64-bit integers JAX would truncate; else jax.numpy."""
    return np if isinstance(array, np.ndarray) else jnp


def clipped(array: Any, least: int, greatest: int) -> jax.Array:
    """Integers of any dtype clipped to [least, greatest], as int32.

    Clipped in their own dtype, in which limits outside its range have no effect; symbolic limits,
    which have no number yet, in one that holds both.
    """
    if not is_static((greatest,)):
        return jnp.clip(jnp.asarray(array), least, jnp.asarray(greatest)).astype(jnp.int32)
    limits = jnp.iinfo(array.dtype)
    low, high = max(least, int(limits.min)), min(greatest, int(limits.max))
    return jnp.asarray(_namespace(array).clip(array, low, high).astype(np.int32))


def clipped_offset(offset: Any) -> jax.Array:
    """Query offsets as int32, clipped to where they move the query beyond every key."""
    return clipped(offset, -_OFFSET_LIMIT, _OFFSET_LIMIT)


def segment_ids(query_ids: Any, key_ids: Any) -> tuple[jax.Array, jax.Array]:
    """Segment ids `[*b, T]`, `[*b, S]` as int32 that are equal exactly where the ids are.

    Ids that fit int32 by their dtype, or by their values where these are known, stay as they are.
    Others are replaced by their rank among all ids of the batch row.
    """
    if _fit_int32(query_ids) and _fit_int32(key_ids):
        return _to_int32(query_ids), _to_int32(key_ids)
    count = query_ids.shape[-1]
    high, low = (
        jnp.concatenate([query_half, key_half], axis=-1)
        for query_half, key_half in zip(_halves(query_ids), _halves(key_ids), strict=True)
    )
    ranks = _ranks(high, low)
    return ranks[..., :count], ranks[..., count:]


def _fit_int32(ids: Any) -> bool:
    if np.can_cast(ids.dtype, np.int32) or ids.size == 0:
        return True
    if not isinstance(ids, np.ndarray):
        return False
    return _INT32.min <= int(ids.min()) and int(ids.max()) <= _INT32.max


def _to_int32(ids: Any) -> jax.Array:
    return jnp.asarray(ids.astype(np.int32))


def _halves(ids: Any) -> tuple[jax.Array, jax.Array]:
    """The high and the low 32 bits of the ids, sign-extended, as int32."""
    if ids.dtype.itemsize == 8:
        halves = ids >> 32, ids & 0xFFFFFFFF
        high, low = (half.astype(np.uint32).view(np.int32) for half in halves)
        return jnp.asarray(high), jnp.asarray(low)
    low = ids.astype(np.uint32 if ids.dtype.kind == "u" else np.int32).view(np.int32)
    high = (low >> 31) if ids.dtype.kind != "u" else low & 0
    return jnp.asarray(high), jnp.asarray(low)


def _ranks(high: jax.Array, low: jax.Array) -> jax.Array:
    """Ranks of the pairs (high, low) along the last axis; equal pairs have equal ranks."""
    axis = high.ndim - 1
    position = lax.broadcasted_iota(jnp.int32, high.shape, axis)
    high, low, position = lax.sort((high, low, position), dimension=axis, num_keys=2)
    new = (high[..., 1:] != high[..., :-1]) | (low[..., 1:] != low[..., :-1])
    rank = jnp.cumsum(jnp.pad(new, [(0, 0)] * axis + [(1, 0)]), axis=-1, dtype=jnp.int32)
    return lax.sort((position, rank), dimension=axis, num_keys=1)[1]
