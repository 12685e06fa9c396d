"""The dropout mask: a pure function of (key, batch index, head index, query index, key index).

Counter-based random numbers, Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC11), so that the forward pass, the backward pass and rematerialisation, on every
implementation and tiling, draw the same mask. One call of Philox serves 8 elements: rows i and
i + 8, columns j, j + 1, j + 8, j + 9 of a 16 x 16 tile, which is what one thread holds of a
tensor-core accumulator.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROUNDS = 7
_MULTIPLIERS = (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57))
_KEY_BUMPS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_TILE = 16


class SharedKey(NamedTuple):
    """A key that draws one mask for all batch rows and heads, in place of `dropout_key`."""

    key: jax.Array


def threshold_of(rate: float) -> int:
    """The 16-bit threshold below which a draw drops: `rate` in units of 1/65536, rounded."""
    return min(65535, round(rate * 65536))


def kept_scale(threshold: int) -> float:
    """What kept probabilities are multiplied by, so that their mean is unchanged."""
    return 65536 / (65536 - threshold)


def stream(key: jax.Array | SharedKey, batch: tuple[int, ...], heads: int) -> jax.Array:
    """The operand that the mask depends on: uint32 `[*batch, heads, 4]`.

    The words are the two key words, the batch index and the head index. They travel as an operand
    along the batch and the heads, so that folding or splitting these axes changes no mask. Both
    indices are 0 everywhere if the key is shared.
    """
    shape = (*batch, heads)
    if isinstance(key, SharedKey):
        return jnp.broadcast_to(stream(key.key, (), 1), (*shape, 4))
    words = jax.random.bits(key, (2,), "uint32")
    batch_index = (
        lax.broadcasted_iota(jnp.uint32, shape, 0) if batch else jnp.zeros(shape, "uint32")
    )
    head_index = lax.broadcasted_iota(jnp.uint32, shape, len(batch))
    key_words = (jnp.broadcast_to(words[0], shape), jnp.broadcast_to(words[1], shape))
    return jnp.stack((*key_words, batch_index, head_index), axis=-1)


def keep_mask(
    stream: jax.Array,
    row_start: jax.Array,
    column_start: jax.Array,
    rows: int,
    columns: int,
    threshold: int,
) -> jax.Array:
    """Which probabilities of a block are kept: bool `[*b, N, rows, columns]`.

    Args:
      stream: uint32 `[*b, N, 4]`, see `stream`.
      row_start: int32 scalar, the query index of the block's first row; any.
      column_start: int32 scalar, the key index of the block's first column; any.
      rows: rows of the block.
      columns: columns of the block.
      threshold: see `threshold_of`.
    """
    row_tiles, column_tiles = _tiles_covering(rows), _tiles_covering(columns)
    row_tile, column_tile = row_start // _TILE, column_start // _TILE
    # Axes of the counters: row tile, row in half a tile, column tile, pair of columns.
    counters = (
        _counter(row_tile, row_tiles, 8)[:, :, None, None],
        _counter(column_tile, column_tiles, 4),
    )
    key0, key1, batch_index, head_index = (
        stream[..., word, None, None, None, None] for word in range(4)
    )
    words = _philox((*counters, batch_index, head_index), (key0, key1))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    shape = jnp.broadcast_shapes(*(half.shape for half in halves))
    # A draw's index is (row half, column half, column parity).
    draws = jnp.stack([jnp.broadcast_to(half, shape) for half in halves], axis=-1)
    draws = draws.reshape(*shape, 2, 2, 2)
    lead = draws.ndim - 7
    order = [lead + axis for axis in (0, 4, 1, 2, 5, 3, 6)]
    keep = jnp.transpose(draws >= threshold, (*range(lead), *order))
    keep = keep.reshape(*shape[:-4], row_tiles * _TILE, column_tiles * _TILE)
    keep = lax.dynamic_slice_in_dim(keep, row_start % _TILE, rows, axis=-2)
    return lax.dynamic_slice_in_dim(keep, column_start % _TILE, columns, axis=-1)


def _tiles_covering(size: int) -> int:
    """How many tiles cover `size` positions wherever they start."""
    return (size + 2 * _TILE - 2) // _TILE


def _counter(first_tile: jax.Array, tiles: int, per_tile: int) -> jax.Array:
    """Counter words `[tiles, per_tile]`."""
    tile = first_tile.astype(jnp.uint32) + jnp.arange(tiles, dtype=jnp.uint32)
    return tile[:, None] * np.uint32(per_tile) + jnp.arange(per_tile, dtype=jnp.uint32)


def _philox(counter: tuple[jax.Array, ...], key: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Four random words for the counter's four words and the key's two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    for round_index in range(_ROUNDS):
        if round_index:
            k0, k1 = k0 + _KEY_BUMPS[0], k1 + _KEY_BUMPS[1]
        c0, c1, c2, c3 = (
            _mulhi(m1, c2) ^ c1 ^ k0,
            m1 * c2,
            _mulhi(m0, c0) ^ c3 ^ k1,
            m0 * c0,
        )
    return c0, c1, c2, c3


def _mulhi(a: np.uint32, b: jax.Array) -> jax.Array:
    """The high words of the 64-bit products of a constant and `b`, from those of their halves.

    XLA cannot compile `lax.mulhi` in programs that are sharded.
    """
    low, half = np.uint32(0xFFFF), np.uint32(16)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)
