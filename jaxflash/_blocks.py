"""Attention cut into blocks: what a block of query rows and one of key columns have to do.

The query axis is cut into blocks of rows, the key axis into blocks of columns. Where the size of an
axis is no multiple of the block, the last block starts earlier and overlaps the one before it; what
it has of that block's is *stale* and takes no part. So nothing is padded, neither bias nor mask is
copied, and `dynamic_slice` cuts all operands alike.

Heads are split into (K, G), key/value head and query group; logits are `[*b, K, G, rows, columns]`.
Everything is computed in the compute dtype. Batch axes of size 1 are never expanded.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxflash import _compat, _dropout
from jaxflash._operands import (
    Config,
    Operands,
    batch_shape,
    compute_dtype,
    is_static,
    reduce_to,
)

# Rows or columns of a block: enough to keep matrix units busy, few enough that a block of logits is
# small beside the operands.
_BLOCK = 512
_INT32_MAX = np.iinfo(np.int32).max

Block = dict[str, jax.Array]

# Loops keep the inputs of their bodies only, so that differentiating them takes bounded memory.
# Inside a loop there is nothing that common subexpression elimination could undo.
rematerialised = functools.partial(jax.checkpoint, prevent_cse=False)


@dataclass(frozen=True)
class BlockedAttention:
    """One call's operands, cut into blocks.

    Attributes:
      config: what is static.
      operands: operands of the forward pass by name.
    """

    config: Config
    operands: Operands

    def __post_init__(self):
        lengths = self.row_count, self.column_count
        if not is_static(lengths):
            raise NotImplementedError(
                f'implementation="xla": expected lengths that are known, got {lengths}; of '
                "symbolic sizes only those of batch axes are supported"
            )

    # Sizes.

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        return batch_shape(self.operands["query"])

    @property
    def rank(self) -> int:
        return len(self.batch)

    @property
    def dtype(self) -> Any:
        return self.operands["query"].dtype

    @property
    def compute_dtype(self) -> np.dtype:
        return compute_dtype(self.dtype)

    @property
    def row_count(self) -> int:
        return self.operands["query"].shape[-3]

    @property
    def column_count(self) -> int:
        return self.operands["key"].shape[-3]

    @property
    def heads(self) -> tuple[int, int]:
        """Key/value heads K and query heads of each, G."""
        key_heads = self.operands["key"].shape[-2]
        return key_heads, self.operands["query"].shape[-2] // key_heads

    @property
    def block_rows(self) -> int:
        return _block_size(self.row_count)

    @property
    def block_columns(self) -> int:
        return _block_size(self.column_count)

    # Layouts.

    def per_batch(self, name: str, axes: int) -> jax.Array:
        """An operand without axes of its own, with `axes` axes of size 1 after the batch axes."""
        operand = self.operands[name]
        return operand.reshape(*operand.shape, *[1] * axes)

    def split_heads(self, array: jax.Array, axis: int) -> jax.Array:
        """Splits a heads axis of size N into (K, G), of size 1 into (1, 1)."""
        axis %= array.ndim
        heads = self.heads if array.shape[axis] != 1 else (1, 1)
        return array.reshape(*array.shape[:axis], *heads, *array.shape[axis + 1 :])

    def from_rows(self, array: jax.Array) -> jax.Array:
        """`[*b, rows, N, ...]` to `[*b, K, G, rows, ...]`."""
        return jnp.moveaxis(self.split_heads(array, self.rank + 1), self.rank, self.rank + 2)

    def to_rows(self, array: jax.Array) -> jax.Array:
        """`[*b, K, G, rows, ...]` to `[*b, rows, N, ...]`."""
        array = jnp.moveaxis(array, self.rank + 2, self.rank)
        shape, heads = array.shape, math.prod(self.heads)
        return array.reshape(*shape[: self.rank + 1], heads, *shape[self.rank + 3 :])

    def zeros(self, axes: str) -> jax.Array:
        """Zeros `[*b, K, G, rows]`, and Hv where `axes` is "v"."""
        width = {"": (), "v": self.operands["value"].shape[-1:]}[axes]
        return self.zeros_of((*self.batch, *self.heads, self.block_rows, *width))

    def zeros_of(self, shape: Sequence[int], dtype: Any = None) -> jax.Array:
        """Zeros to start a loop's carry from, which must vary over a mesh as its result does."""
        zeros = jnp.zeros(shape, dtype or self.compute_dtype)
        return _compat.vary_alike([zeros], like=list(self.operands.values()))[0]

    def dot(
        self, subscripts: str, x: jax.Array, y: jax.Array, keep: Sequence[int] | None = None
    ) -> jax.Array:
        """An einsum over operands with batch axes of size 1 or full, which are not expanded.

        Args:
          subscripts: as in `jnp.einsum`, of the axes after the batch axes, in lower case.
          x: left operand.
          y: right operand.
          keep: the result's batch axes; those of size 1 are summed. Default: nothing is summed.
        """
        left, right, out = subscripts.replace("->", ",").split(",")
        letters = string.ascii_uppercase[: self.rank]
        x, left_batch = _squeeze_batch(x, letters)
        y, right_batch = _squeeze_batch(y, letters)
        kept = [
            letter
            for axis, letter in enumerate(letters)
            if letter in left_batch + right_batch and (keep is None or keep[axis] != 1)
        ]
        result = jnp.einsum(f"{left_batch}{left},{right_batch}{right}->{''.join(kept)}{out}", x, y)
        return jnp.expand_dims(
            result, [axis for axis, letter in enumerate(letters) if letter not in kept]
        )

    # Blocks.

    def row_blocks(self, arrays: Block | None = None) -> Block:
        """Operands with a query axis, and `arrays`, cut along it: leading axis of blocks."""
        names = ("query", "query_segment_ids")
        return self._cut(self.row_count, names, arrays)

    def column_blocks(self, arrays: Block | None = None) -> Block:
        """Operands with a key axis, and `arrays`, cut along it: leading axis of blocks."""
        names = ("key", "value", "key_value_segment_ids")
        return self._cut(self.column_count, names, arrays)

    def _cut(self, size: int, names: Sequence[str], arrays: Block | None) -> Block:
        arrays = {name: self.operands[name] for name in names if name in self.operands} | (
            arrays or {}
        )
        block = _block_size(size)
        first = np.arange(0, size, block, dtype=np.int32)
        blocks = {name: _split(array, self.rank, block) for name, array in arrays.items()}
        starts = np.minimum(first, np.int32(size - block))
        return blocks | {"first": jnp.asarray(first), "start": jnp.asarray(starts)}

    def merge(self, blocks: jax.Array, size: int) -> jax.Array:
        """Puts blocks of results, cut along the axis after the batch axes, together again."""
        return _merge(blocks, self.rank, size)

    def map_rows(
        self, body: Callable[[Block], tuple[jax.Array, ...]], arrays: Block | None = None
    ) -> tuple[jax.Array, ...]:
        """Results of `body` for every block of rows, put together."""
        blocks = self.row_blocks(arrays)
        _, results = lax.scan(rematerialised(lambda _, block: ((), body(block))), (), blocks)
        return tuple(self.merge(result, self.row_count) for result in results)

    def scan_columns(
        self,
        body: Callable[[Any, Block], Any],
        init: Any,
        row: Block,
        arrays: Block | None = None,
    ) -> Any:
        """The last carry of `body` over the blocks of columns that the block of rows may see."""
        if self.column_count == 0:
            return init

        def step(carry: Any, column: Block) -> tuple[Any, None]:
            def run() -> Any:
                return body(carry, self.load_column(column))

            return self.if_seen(row, column, run, carry), None

        return lax.scan(rematerialised(step), init, self.column_blocks(arrays))[0]

    def load_row(self, row: Block) -> Block:
        """A block of rows in the compute dtype, zero where a row is past the query's length.

        Adds `alive` `[*b, 1, 1, rows, 1]`; query and cotangent are by (K, G).
        """
        positions = row["start"] + jnp.arange(self.block_rows, dtype=jnp.int32)
        alive = positions >= row["first"]
        if "query_lengths" in self.operands:
            alive &= positions < self.per_batch("query_lengths", 1)
        row = row | {"positions": positions}
        # A row that sees nothing contributes nothing, whatever its query and cotangent.
        seeing = alive[..., None]
        if "logit_max" in row:
            seeing &= row["logit_max"] != -jnp.inf
        for name in ("query", "d_query", "output_cotangent"):
            if name in row:
                clean = jnp.where(seeing[..., None], row[name], 0)
                row[name] = self.split_heads(clean.astype(self.compute_dtype), -2)
        row["alive"] = alive[..., None, None, :, None]
        return row

    def load_column(self, column: Block) -> Block:
        """A block of columns in the compute dtype, zero where past the keys' length."""
        positions = column["start"] + jnp.arange(self.block_columns, dtype=jnp.int32)
        exists = positions >= column["first"]
        if "key_value_lengths" in self.operands:
            exists &= positions < self.per_batch("key_value_lengths", 1)
        column = column | {"positions": positions}
        for name in ("key", "value", "d_key", "d_value"):
            if name in column:
                clean = jnp.where(exists[..., None, None], column[name], 0)
                column[name] = clean.astype(self.compute_dtype)
        column["exists"] = exists[..., None, None, None, :]
        return column

    def pair_block(self, array: jax.Array, row: Block, column: Block) -> jax.Array:
        """The block of a bias or mask `[*b, N|1, T|1, S|1]`, heads split."""
        starts, sizes = self._pair_window(array, row, column)
        return self.split_heads(lax.dynamic_slice(array, starts, sizes), -3)

    def add_pair_block(
        self, total: jax.Array, block: jax.Array, row: Block, column: Block
    ) -> jax.Array:
        """Adds a block of logits' cotangents to a bias's, summed over what the bias broadcasts."""
        starts, sizes = self._pair_window(total, row, column)
        block = block.reshape(*block.shape[: self.rank], math.prod(self.heads), *block.shape[-2:])
        block = reduce_to(block, sizes) + lax.dynamic_slice(total, starts, sizes)
        return lax.dynamic_update_slice(total, block, starts)

    def _pair_window(
        self, array: jax.Array, row: Block, column: Block
    ) -> tuple[list[Any], list[int]]:
        starts: list[Any] = [np.int32(0)] * array.ndim
        sizes = list(array.shape)
        if sizes[-2] != 1:
            starts[-2], sizes[-2] = row["start"], self.block_rows
        if sizes[-1] != 1:
            starts[-1], sizes[-1] = column["start"], self.block_columns
        return starts, sizes

    # Logits.

    def logits(self, row: Block, column: Block) -> tuple[jax.Array, jax.Array, jax.Array | float]:
        """Logits (finite where not visible), what is visible, and the soft cap's derivative."""
        # Scaled after the product: its operands of 16 bits are exact in TF32 as they come.
        logits = self.dot("qkgh,skh->kgqs", row["query"], column["key"])
        logits *= self.per_batch("scale", 4)
        slope: jax.Array | float = 1.0
        if self.config.soft_cap:
            tanh = jnp.tanh(logits / self.config.soft_cap)
            logits, slope = self.config.soft_cap * tanh, 1 - tanh * tanh
        visible = self._visible(row, column)
        if "bias" in self.operands:
            bias = self.pair_block(self.operands["bias"], row, column).astype(self.compute_dtype)
            visible &= bias != -jnp.inf
            logits += jnp.where(visible, bias, 0)
        return logits, visible, slope

    def weights(self, row: Block, column: Block) -> tuple[jax.Array, jax.Array, jax.Array | float]:
        """Probabilities before dropout, what is visible, and the soft cap's derivative.

        The log-sum-exp is subtracted in two parts, rounded and what that took away: without the
        latter, probabilities of rows whose logits are large would be lost. It is above all logits;
        logit_max need not be: CUDA kernels leave it up to 8 ln 2 behind.
        """
        logits, visible, slope = self.logits(row, column)
        seeing = row["logit_max"] != -jnp.inf
        logit_max, log_sum = jnp.where(seeing, row["logit_max"], 0), row["log_sum"]
        # A constant to the derivatives, which are those of the rest.
        rounded = lax.stop_gradient(logit_max + log_sum)
        rest = (logit_max - rounded) + log_sum
        logits = below(logits, self.from_rows(rounded)[..., None])
        logits = below(logits, self.from_rows(rest)[..., None])
        visible &= self.from_rows(seeing)[..., None]
        weights = jnp.exp(jnp.where(visible, logits, 0))
        return jnp.where(visible, weights, 0), visible, slope

    def sink_weights(self, row: Block) -> jax.Array:
        """Probabilities of the sinks `[*b, K, G, rows]`."""
        sinks = self.split_heads(self.operands["sinks"], -1)[..., None]
        return sink_weights(sinks, self.from_rows(row["logit_max"]), self.from_rows(row["log_sum"]))

    def initial_statistics(self, row: Block) -> tuple[jax.Array, jax.Array]:
        """Maximum and sum of exponentials `[*b, K, G, rows]` before the first key: of the sink."""
        nothing = self.zeros("") - jnp.inf
        if "sinks" not in self.operands:
            return nothing, self.zeros("")
        sinks = self.split_heads(self.operands["sinks"], -1)[..., None]
        row_max = jnp.where(row["alive"][..., 0], sinks, nothing)
        return row_max, jnp.where(row_max != -jnp.inf, 1, self.zeros(""))

    def scaled_query_tangent(self, row: Block, d_scale: jax.Array | None) -> jax.Array | None:
        """The derivative of scale * query, None where neither has a tangent."""
        terms = []
        if "d_query" in row:
            terms.append(row["d_query"] * self.per_batch("scale", 4))
        if d_scale is not None:
            terms.append(row["query"] * d_scale.reshape(*d_scale.shape, 1, 1, 1, 1))
        return sum(terms[1:], start=terms[0]) if terms else None

    def drop(self, weights: jax.Array, row: Block, column: Block) -> jax.Array:
        """Drops and rescales `weights` `[*b, K, G, rows, columns]` where there is dropout."""
        threshold = self.config.dropout_threshold
        if not threshold:
            return weights
        keep = _dropout.keep_mask(
            self.operands["dropout_stream"],
            row["start"],
            column["start"],
            self.block_rows,
            self.block_columns,
            threshold,
        )
        return jnp.where(self.split_heads(keep, -3), weights * _dropout.kept_scale(threshold), 0)

    # Visibility.

    def _visible(self, row: Block, column: Block) -> jax.Array:
        visible = row["alive"] & column["exists"]
        rows, columns = row["positions"][:, None], column["positions"]
        if self._has_window:
            distance = columns - rows - self._offset(4)
            visible &= self._within_window(distance, distance)
        if "query_segment_ids" in self.operands:
            row_ids = row["query_segment_ids"][..., None, None, :, None]
            visible &= row_ids == column["key_value_segment_ids"][..., None, None, None, :]
        if "mask" in self.operands:
            visible &= self.pair_block(self.operands["mask"], row, column)
        return visible

    @property
    def _has_window(self) -> bool:
        return self.config.window_left >= 0 or self.config.window_right >= 0

    def _offset(self, axes: int) -> jax.Array | int:
        if "query_offset" not in self.operands:
            return 0
        return self.per_batch("query_offset", axes)

    def _within_window(self, least: jax.Array, greatest: jax.Array) -> jax.Array:
        """Whether an interval of distances (key minus query position) meets the window."""
        left, right = self.config.window_left, self.config.window_right
        within = jnp.full(jnp.shape(least), True)
        if left >= 0:
            within &= greatest >= -min(left, _INT32_MAX)
        if right >= 0:
            within &= least <= min(right, _INT32_MAX)
        return within

    def if_seen(self, row: Block, column: Block, run: Callable[[], Any], skipped: Any) -> Any:
        """`run()` where a row of the block may see a column of the block, else `skipped`."""
        rules = self._block_rules(row, column)
        if not rules:
            return run()
        seen = functools.reduce(jnp.logical_and, rules)
        return lax.cond(jnp.any(seen), run, lambda: skipped)

    def _block_rules(self, row: Block, column: Block) -> list[jax.Array]:
        """Necessary conditions of a batch row `[*b]` for anything in the block to be visible."""
        rules = []
        if "query_lengths" in self.operands:
            rules.append(row["first"] < self.operands["query_lengths"])
        if "key_value_lengths" in self.operands:
            rules.append(column["first"] < self.operands["key_value_lengths"])
        if self._has_window:
            last_row = row["start"] + self.block_rows - 1
            last_column = column["start"] + self.block_columns - 1
            offset = self._offset(0)
            rules.append(
                self._within_window(
                    column["first"] - last_row - offset, last_column - row["first"] - offset
                )
            )
        if "query_segment_ids" in self.operands:
            row_ids, column_ids = row["query_segment_ids"], column["key_value_segment_ids"]
            rules.append(jnp.max(row_ids, axis=-1) >= jnp.min(column_ids, axis=-1))
            rules.append(jnp.min(row_ids, axis=-1) <= jnp.max(column_ids, axis=-1))
        return rules


@jax.custom_jvp
def below(logits: jax.Array, reference: jax.Array) -> jax.Array:
    """Logits minus a reference, 0 for those above it; its derivative is that of the difference.

    A reference is the maximum or the log-sum-exp of logits that were rounded, and is above all of
    them but for rounding. A compiler may multiply and subtract at once, without rounding between; a
    comparison takes care that it does not.
    """
    return jnp.where(logits > reference, reference, logits) - reference


@below.defjvp
def _(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return below(*primals), tangents[0] - tangents[1]


def sink_weights(sinks: jax.Array, logit_max: jax.Array, log_sum: jax.Array) -> jax.Array:
    """Probabilities of the sinks, 0 in rows past their length; all arguments broadcast."""
    exists = (logit_max != -jnp.inf) & (sinks != -jnp.inf)
    exponent = (jnp.where(exists, sinks, 0) - jnp.where(exists, logit_max, 0)) - log_sum
    return jnp.where(exists, jnp.exp(jnp.where(exists, exponent, 0)), 0)


def _block_size(size: int) -> int:
    """The size of the blocks of an axis: no more than needed for the same number of blocks."""
    count = -(-size // _BLOCK)
    return -(-size // count) if count else 1


def _split(array: jax.Array, axis: int, block: int) -> jax.Array:
    """Cuts an axis into blocks, which get a new leading axis; the last may overlap another."""
    size = array.shape[axis]
    whole, rest = divmod(size, block)

    def cut(part: jax.Array) -> jax.Array:
        count = part.shape[axis] // block
        return part.reshape(*part.shape[:axis], count, block, *part.shape[axis + 1 :])

    blocks = cut(lax.slice_in_dim(array, 0, whole * block, axis=axis)) if rest else cut(array)
    if rest:
        last = cut(lax.slice_in_dim(array, size - block, size, axis=axis))
        blocks = jnp.concatenate([blocks, last], axis=axis)
    return jnp.moveaxis(blocks, axis, 0)


def _merge(blocks: jax.Array, axis: int, size: int) -> jax.Array:
    """The inverse of `_split`: what is stale in the last block is left out."""
    count, block = blocks.shape[0], blocks.shape[axis + 1]
    blocks = jnp.moveaxis(blocks, 0, axis)
    shape = blocks.shape
    array = blocks.reshape(*shape[:axis], count * block, *shape[axis + 2 :])
    stale = count * block - size
    if not stale:
        return array
    start = (count - 1) * block
    return jnp.concatenate(
        [
            lax.slice_in_dim(array, 0, start, axis=axis),
            lax.slice_in_dim(array, start + stale, count * block, axis=axis),
        ],
        axis=axis,
    )


def _squeeze_batch(array: jax.Array, letters: str) -> tuple[jax.Array, str]:
    """Removes batch axes of size 1; returns the letters of those that are left."""
    axes = [axis for axis in range(len(letters)) if array.shape[axis] == 1]
    left = "".join(letter for axis, letter in enumerate(letters) if axis not in axes)
    return jnp.squeeze(array, axes), left
