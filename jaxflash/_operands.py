"""The operands of the attention primitives: their names, order and ranks, in one place.

Every operand has the same number of leading batch axes, each of size 1 or the full size, as in
NumPy broadcasting. The query (and what has its rows: output, cotangent, statistics) always has the
full size. Letters: `*b` batch axes, T query length, S key length, N query heads, K key/value heads,
H query/key head dim, Hv value head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

# Name -> axes after the batch axes. The order is the order of the primitives' operands and of the
# native handlers' arguments.
FORWARD_OPERANDS: Mapping[str, str] = {
    "query": "TNH",
    "key": "SKH",
    "value": "SKV",
    "bias": "NTS",
    "mask": "NTS",
    "sinks": "N",
    "scale": "",
    "query_lengths": "",
    "key_value_lengths": "",
    "query_offset": "",
    "query_segment_ids": "T",
    "key_value_segment_ids": "S",
    "dropout_stream": "NW",
}

# What the forward pass returns, in order.
FORWARD_RESULTS: Mapping[str, str] = {"output": "TNV", "logit_max": "TN", "log_sum": "TN"}

# What the backward pass takes besides, in order.
BACKWARD_OPERANDS: Mapping[str, str] = {
    "output_cotangent": "TNV",
    "logit_max": "TN",
    "log_sum": "TN",
    "delta": "TN",
}

# What it returns has an operand's name and axes, but that of the scale is a share for each row.
COTANGENTS: Mapping[str, str] = {**FORWARD_OPERANDS, "scale": "TN"}

# The operands that have gradients.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "scale")

Operands = dict[str, jax.Array]

# What the backward pass shall compute: names, and of each which batch axes are full (else 1, the
# sum). They are full wherever the operand's are.
Wanted = tuple[tuple[str, tuple[bool, ...]], ...]


@dataclass(frozen=True)
class Config:
    """What is static about a call; a parameter of every primitive.

    Attributes:
      operands: names of the operands that are there, in the order of `FORWARD_OPERANDS`.
      window_left: how many keys before its own position a query sees; -1 = all.
      window_right: how many keys after its own position a query sees; -1 = all.
      soft_cap: the cap of the logits; 0 = none.
      dropout_threshold: a 16-bit draw below it drops the probability; 0 = no dropout.
      deterministic_gradients: whether gradients must be bitwise equal from run to run.
      implementation: `None`, `"native"` or `"xla"`, as the user gave it.
      precision: precision of matrix products, a value of `jax_default_matmul_precision`.
    """

    operands: tuple[str, ...]
    window_left: int = -1
    window_right: int = -1
    soft_cap: float = 0.0
    dropout_threshold: int = 0
    deterministic_gradients: bool = False
    implementation: str | None = None
    precision: str = "highest"

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Maps the names of the operands that are there to `arrays`, given in order."""
        return dict(zip(self.operands, arrays, strict=True))


def compute_dtype(dtype: Any) -> np.dtype:
    """The dtype of softmax, accumulators and statistics: f32, or f64 where the query is f64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def batch_shape(query: Any) -> tuple[int, ...]:
    """The batch axes of a query `[*b, T, N, H]`, which always have the full size."""
    return tuple(query.shape[:-3])


def is_static(shape: Sequence[Any]) -> bool:
    """Whether all sizes are known: those of an exported program may be symbols."""
    return not any(is_symbolic_dim(size) for size in shape)


def cotangent_shape(
    name: str, full: Sequence[bool], operands: Mapping[str, Any]
) -> tuple[int, ...]:
    """The shape of a result of the backward pass; the scale's is per row, `[*b, T, N]`."""
    query = operands["query"]
    if name == "scale":
        return query.shape[:-1]
    batch = [size if whole else 1 for size, whole in zip(batch_shape(query), full, strict=True)]
    return (*batch, *operands[name].shape[len(batch) :])


def reduce_to(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Sums `array` over the axes where `shape` has size 1, and keeps them."""
    axes = tuple(
        axis
        for axis, (have, want) in enumerate(zip(array.shape, shape, strict=True))
        if want == 1 and have != 1
    )
    return jnp.sum(array, axis=axes, keepdims=True) if axes else array
