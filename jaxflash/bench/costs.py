"""What attention costs at least: floating-point operations, by the count that papers use; bytes."""

from __future__ import annotations

import numpy as np


def visible_pairs(
    query_length: int,
    key_length: int,
    *,
    is_causal: bool = False,
    local_window_size: tuple[int | None, int | None] | int | None = None,
    query_offset: int = 0,
) -> int:
    """Returns how many (query, key) pairs of one head are visible.

    Args:
      query_length: T.
      key_length: S.
      is_causal: whether key j is visible to query i only where `j <= i + query_offset`.
      local_window_size: (left, right), or one int for both: key j is visible only where
        `i + query_offset - left <= j <= i + query_offset + right`; None is unlimited.
      query_offset: position of query 0 on the key axis.
    """
    if not isinstance(local_window_size, tuple):
        local_window_size = (local_window_size, local_window_size)
    left, right = local_window_size
    if is_causal:
        right = 0
    position = np.arange(query_length, dtype=np.int64) + query_offset
    first = np.zeros_like(position) if left is None else np.maximum(position - left, 0)
    past = np.full_like(position, key_length)
    if right is not None:
        past = np.minimum(past, position + right + 1)
    return int(np.maximum(past - first, 0).sum())


def attention_flops(pairs: int, head_dim: int, *, backward: bool = False) -> int:
    """Returns the FLOP of the matrix products over the visible pairs.

    Forward has two products (query by key, probabilities by value), of two FLOP an element;
    backward has five. The softmax counts nothing, what a kernel computes but nobody sees counts
    nothing, and neither does what it computes twice.

    Args:
      pairs: visible pairs of all query heads and batch rows.
      head_dim: head dim of query, key and value.
      backward: whether to count backward without forward, instead of forward.
    """
    products = 5 if backward else 2
    return 2 * products * pairs * head_dim


def attention_bytes(
    query_numbers: int, key_numbers: int, rows: int, itemsize: int, *, backward: bool = False
) -> int:
    """Returns the bytes that have to move from or to memory, each array once.

    Forward reads query, key and value, and writes the output and a float32 log-sum-exp. Backward
    reads these and the output's cotangent, and writes three gradients.

    Args:
      query_numbers: numbers in the query, and as many in the output.
      key_numbers: numbers in the key, and as many in the value.
      rows: rows of logits, of all heads: the numbers of the log-sum-exp.
      itemsize: bytes of a number.
      backward: whether to count backward without forward, instead of forward.
    """
    queries, keys = (4, 4) if backward else (2, 2)
    return (queries * query_numbers + keys * key_numbers) * itemsize + 4 * rows


def matmul_flops(rows: int, columns: int, inner: int) -> int:
    """Returns the FLOP of a [rows, inner] by [inner, columns] product."""
    return 2 * rows * columns * inner
