"""Sequences of different lengths, padded to one length or packed into rows.

    python examples/packing.py

Both give every document the attention that it has alone. Padding computes a row for each document;
what lies past its length is skipped and gives zeros. Packing puts documents one behind another,
told apart by segment ids. Compared with `jax.nn`'s attention of each document by itself.
"""

import argparse

import jax
import jax.numpy as jnp

from jaxflash import flash_attention

LENGTHS = (37, 190, 5, 61, 150, 96)
ROW, HEADS, HEAD_DIM = 256, 4, 32


def padded(documents):
    """Arrays `[length, N, H]` as one of `[B, ROW, N, H]`; NaN shows that padding is never read."""
    return jnp.stack(
        [
            jnp.pad(x, ((0, ROW - len(x)), (0, 0), (0, 0)), constant_values=jnp.nan)
            for x in documents
        ]
    )


def rows_of(lengths):
    """Which documents share a row, each put into the first row that has room for it."""
    rows = []
    for document, length in sorted(enumerate(lengths), key=lambda pair: -pair[1]):
        for row in rows:
            if sum(lengths[other] for other in row) + length <= ROW:
                row.append(document)
                break
        else:
            rows.append([document])
    return rows


def packed(documents, rows):
    """Arrays `[length, N, H]` as one of `[rows, ROW, N, H]`, with segment ids `[rows, ROW]`."""
    arrays, ids = [], []
    for row in rows:
        array = jnp.concatenate([documents[document] for document in row])
        array_ids = jnp.concatenate([jnp.full(len(documents[d]), d) for d in row])
        free = ROW - len(array)
        arrays.append(jnp.pad(array, ((0, free), (0, 0), (0, 0))))
        ids.append(jnp.pad(array_ids, (0, free), constant_values=-1))
    return jnp.stack(arrays), jnp.stack(ids)


def main():
    keys = jax.random.split(jax.random.key(0), len(LENGTHS))
    documents = [
        jax.random.normal(key, (length, HEADS, HEAD_DIM))
        for key, length in zip(keys, LENGTHS, strict=True)
    ]
    alone = [jax.nn.dot_product_attention(x, x, x, is_causal=True) for x in documents]

    x = padded(documents)
    lengths = jnp.array(LENGTHS)
    from_padded = flash_attention(
        x, x, x, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths
    )
    padded_error = max(
        jnp.abs(from_padded[i, : len(x)] - x).max().item() for i, x in enumerate(alone)
    )
    print(f"padded: {len(LENGTHS)} rows of {ROW}, largest difference from alone {padded_error:.1e}")
    rest = max(jnp.abs(from_padded[i, n:]).max().item() for i, n in enumerate(LENGTHS))
    print(f"padded: largest number past a length {rest}")

    rows = rows_of(LENGTHS)
    x, ids = packed(documents, rows)
    from_packed = flash_attention(
        x, x, x, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids
    )
    packed_error = max(
        jnp.abs(from_packed[ids == document] - x.reshape(-1, HEADS, HEAD_DIM)).max().item()
        for document, x in enumerate(alone)
    )
    print(f"packed: {len(rows)} rows of {ROW}, largest difference from alone {packed_error:.1e}")
    print(f"rows hold the documents {rows}")
    return {"padded": padded_error, "past a length": rest, "packed": packed_error}


if __name__ == "__main__":
    # No options but --help.
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
