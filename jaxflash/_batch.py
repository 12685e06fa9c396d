"""Batch axes as the native kernels take them: few, however many `vmap`s are nested."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class MergedBatch:
    """Neighbouring batch axes that every array broadcasts alike, merged.

    Attributes:
      shape: the full batch axes.
      groups: of each merged axis the axes (first, last + 1) that it is made of. Axes whose full
        size is 1 are in no group, unless between others.
    """

    shape: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shape: Sequence[int], batches: Sequence[Sequence[int]], most: int) -> MergedBatch:
        """Merges as much as goes without copies, and more where too many axes are left.

        Args:
          shape: the full batch axes.
          batches: batch axes of every array, each of size 1 or full.
          most: how many axes may be left.
        """
        groups: list[tuple[int, int]] = []
        previous = None
        for axis, size in enumerate(shape):
            pattern = [batch[axis] == 1 for batch in batches]
            if size == 1:
                continue
            if pattern == previous:
                groups[-1] = (groups[-1][0], axis + 1)
            else:
                groups.append((axis, axis + 1))
            previous = pattern
        while len(groups) > most:
            (first, _), (_, end), *rest = groups
            groups = [(first, end), *rest]
        return cls(tuple(shape), tuple(groups))

    @property
    def rank(self) -> int:
        """How many batch axes there are after merging."""
        return len(self.groups)

    def merged_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The merged shape of an array: an axis is full where any axis of its group is."""
        merged = (
            math.prod(self.shape[first:end]) if self._is_full(shape, first, end) else 1
            for first, end in self.groups
        )
        return (*merged, *shape[len(self.shape) :])

    def merge(self, array: jax.Array) -> jax.Array:
        """Merges the batch axes of an array; copies only where its group is full in part."""
        return jnp.broadcast_to(array, self._expanded(array.shape)).reshape(
            self.merged_shape(array.shape)
        )

    def split(self, array: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The inverse, for a result that is wanted in `shape`.

        Axes that could not be summed inside a merged group are full in the result.
        """
        rank = len(self.shape)
        full = list(self.shape)
        for (first, end), size in zip(self.groups, array.shape, strict=False):
            if size == 1:
                full[first:end] = [1] * (end - first)
        return array.reshape(*full, *shape[rank:])

    def _expanded(self, shape: Sequence[int]) -> tuple[int, ...]:
        expanded = list(shape)
        for first, end in self.groups:
            if self._is_full(shape, first, end):
                expanded[first:end] = self.shape[first:end]
        return tuple(expanded)

    def _is_full(self, shape: Sequence[int], first: int, end: int) -> bool:
        return any(size != 1 for size in shape[first:end])
