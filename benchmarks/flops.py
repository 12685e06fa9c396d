"""How many floating-point operations attention takes, by the count that papers use."""


def attention_flops(
    *,
    batch: int,
    query_length: int,
    key_length: int,
    heads: int,
    head_dim: int,
    is_causal: bool = False,
    backward: bool = False,
) -> int:
    """Returns the FLOP of the matrix products over the visible (query, key) pairs.

    Forward has two products (query by key, probabilities by value), of two FLOP an element.
    Backward has five. The softmax counts nothing, what a kernel computes but nobody sees counts
    nothing, and neither does what it computes twice.

    Args:
      batch: batch size.
      query_length: T.
      key_length: S.
      heads: number of query heads.
      head_dim: head dim of query, key and value.
      is_causal: whether query i sees the keys 0..i only.
      backward: whether to count forward and backward, instead of forward alone.
    """
    pairs = query_length * key_length
    if is_causal:
        triangle = min(query_length, key_length)
        pairs = triangle * (triangle + 1) // 2 + (query_length - triangle) * key_length
    products = 7 if backward else 2
    return 2 * products * batch * heads * pairs * head_dim


def matmul_flops(rows: int, columns: int, inner: int) -> int:
    """Returns the FLOP of a [rows, inner] by [inner, columns] product."""
    return 2 * rows * columns * inner
