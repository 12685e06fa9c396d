"""Attention problems, their operands, and what their results should be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxflash import flash_attention
from jaxflash.bench.costs import attention_bytes, attention_flops, visible_pairs

DOCUMENTS = 8
VISIBLE_SHARE = 0.9
SOFT_CAP = 50.0
DROPOUT_RATE = 0.1
FEATURES = {
    "plain": None,
    "bias [1,N,T,S]": "bias",
    "bias [B,N,T,S]": "bias",
    "8 documents": "documents",
    "mask [B,1,T,S]": "mask",
    "dropout 0.1": "dropout",
    "soft cap 50": "soft cap",
}
"""What there is beside plain attention, and what a contender must support for it."""

GROUPED = "grouped heads"
"""What it must support where heads share a key head."""

REFERENCE_ROWS = 2048
"""At most so many queries at a time, so that the reference's memory grows with T alone."""

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Arrays = dict[str, jax.Array]
Specs = dict[str, jax.ShapeDtypeStruct]


class Inputs(NamedTuple):
    """What attention is computed of; the last three where a problem has them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    segment_ids: jax.Array | None = None


Attention = Callable[[Inputs], jax.Array]


@dataclass(frozen=True)
class Problem:
    """Self-attention of `batch` sequences of `length` tokens.

    Attributes:
      batch: B.
      length: T, and S.
      heads: N.
      head_dim: H.
      dtype: that of query, key, value and bias.
      is_causal: whether a query sees no later key.
      feature: one of `FEATURES`.
      kv_heads: K, of which N is a multiple. Default: N.
      window: how many keys a query sees to each side of its own. Default: all.
      repeats: calls in one program, each of the result of the one before, so that the time of a
        short call is not that of its dispatch.
    """

    batch: int
    length: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    is_causal: bool = False
    feature: str = "plain"
    kv_heads: int | None = None
    window: int | None = None
    repeats: int = 1

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.heads // (self.kv_heads or self.heads)

    @property
    def documents(self) -> int:
        """How many of them a sequence holds."""
        return DOCUMENTS if "documents" in self.needs else 1

    @property
    def soft_cap(self) -> float | None:
        """The bound of the logits."""
        return SOFT_CAP if "soft cap" in self.needs else None

    @property
    def dropout_rate(self) -> float:
        """The share of probabilities that is dropped."""
        return DROPOUT_RATE if "dropout" in self.needs else 0.0

    @property
    def needs(self) -> set[str]:
        """What not every contender can do, in the words of `Contender.supports`."""
        feature = FEATURES[self.feature]
        return {
            *([feature] if feature else []),
            *([GROUPED] if self.group > 1 else []),
            *(["window"] if self.window is not None else []),
        }

    @property
    def query(self) -> jax.ShapeDtypeStruct:
        """The type of the query, the output and its cotangent."""
        shape = (self.batch, self.length, self.heads, self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    @property
    def key(self) -> jax.ShapeDtypeStruct:
        """The type of key and value."""
        shape = (self.batch, self.length, self.heads // self.group, self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    def differentiable(self) -> Specs:
        """The types of the operands that have a gradient."""
        specs: Specs = {"query": self.query, "key": self.key, "value": self.key}
        if "bias" in self.needs:
            batch = 1 if "[1," in self.feature else self.batch
            shape = (batch, self.heads, self.length, self.length)
            specs["bias"] = jax.ShapeDtypeStruct(shape, self.query.dtype)
        return specs

    def constants(self) -> Specs:
        """The types of the operands that have none."""
        if "mask" in self.needs:
            shape = (self.batch, 1, self.length, self.length)
            return {"mask": jax.ShapeDtypeStruct(shape, jnp.dtype(bool))}
        if self.documents > 1:
            return {"segment_ids": jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32)}
        return {}

    def scores_bytes(self) -> int:
        """Bytes of all logits in float32, which attention without tiles holds."""
        return 4 * self.batch * self.heads * self.length**2

    def flops(self, direction: Direction) -> int:
        """FLOP of a call, backward without forward; of documents, what they see of themselves."""
        # As the ids have it: key j belongs to document 8 * j // length.
        ends = [-(-self.length * i // self.documents) for i in range(self.documents + 1)]
        pairs = sum(
            visible_pairs(length, length, is_causal=self.is_causal, local_window_size=self.window)
            for length in (after - before for before, after in itertools.pairwise(ends))
        )
        pairs *= self.batch * self.heads
        return attention_flops(pairs, self.head_dim, backward=direction == "backward")

    def bytes_moved(self, direction: Direction) -> int:
        """The least bytes of a call, backward without forward, bias and mask left out."""
        return attention_bytes(
            self.query.size,
            self.key.size,
            self.batch * self.length * self.heads,
            self.query.dtype.itemsize,
            backward=direction == "backward",
        )

    def checked_part(self, name: str, array: jax.Array) -> jax.Array:
        """Returns the part of an operand, or its gradient, that is checked.

        One key head, of one batch row where none shares a gradient with it.
        """
        rows = self.batch if self.feature == "bias [1,N,T,S]" else 1
        if name in ("bias", "mask"):
            return array[:rows, : self.group]
        if name == "segment_ids":
            return array[:rows]
        return array[:rows, :, : 1 if name in ("key", "value") else self.group]

    def checked_parts(self, arrays: Arrays) -> Arrays:
        """Returns the part of each array, by name."""
        return {name: self.checked_part(name, array) for name, array in arrays.items()}

    def to_json(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)


PROBLEM_FIELDS = tuple(field.name for field in fields(Problem))


def problem_of(row: dict[str, Any]) -> Problem:
    """Returns the problem that a row of results belongs to."""
    return Problem(**{name: row[name] for name in PROBLEM_FIELDS})


def dropout_key() -> jax.Array:
    """The key of every dropout mask."""
    return jax.random.key(7)


def normals(seed: int, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Random normal numbers; arrays of one size share the program that draws them."""
    numbers = jax.random.normal(jax.random.key(seed), (spec.size,), jnp.float32)
    return numbers.astype(spec.dtype).reshape(spec.shape)


def make_operands(problem: Problem) -> tuple[Arrays, Arrays, jax.Array]:
    """Returns the operands with a gradient, those without, and the output's cotangent."""
    specs = problem.differentiable()
    arrays = {name: normals(seed, spec) for seed, (name, spec) in enumerate(specs.items())}
    constants: Arrays = {}
    for name, spec in problem.constants().items():
        if name == "mask":
            constants[name] = jax.random.bernoulli(jax.random.key(5), VISIBLE_SHARE, spec.shape)
        else:
            ids = jnp.arange(problem.length, dtype=jnp.int32) * DOCUMENTS // problem.length
            constants[name] = jnp.broadcast_to(ids, spec.shape)
    return arrays, constants, normals(6, problem.query)


def same_document(query_ids: jax.Array, key_ids: jax.Array) -> jax.Array:
    """Segment ids `[B, T]` and `[B, S]` as a mask `[B, 1, T, S]`."""
    return query_ids[:, None, :, None] == key_ids[:, None, None, :]


def dense_attention(problem: Problem, rows: Any = slice(None)) -> Attention:
    """Returns attention as the formula says it, of every feature; scores in float32 or wider.

    Args:
      problem: what is computed.
      rows: which queries' outputs: a slice, or indices `[t]`.
    """
    keys = jnp.arange(problem.length)
    queries = keys[rows, None]

    def visible_keys(mask: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array:
        visible = jnp.ones((queries.shape[0], problem.length), bool)
        if problem.is_causal:
            visible &= keys <= queries
        if problem.window is not None:
            visible &= jnp.abs(keys - queries) <= problem.window
        if mask is not None:
            visible = visible & mask[:, :, rows]
        if segment_ids is not None:
            visible = visible & same_document(segment_ids[:, rows], segment_ids)
        return visible

    def attention(inputs: Inputs) -> jax.Array:
        query, key, value, bias, mask, segment_ids = inputs
        wide = jnp.promote_types(query.dtype, jnp.float32)
        key, value = (jnp.repeat(x, problem.group, axis=2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query[:, rows], key, preferred_element_type=wide)
        scores *= problem.head_dim**-0.5
        if problem.soft_cap:
            scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
        if bias is not None:
            scores += bias[:, :, rows].astype(wide)
        probabilities = jax.nn.softmax(jnp.where(visible_keys(mask, segment_ids), scores, -jnp.inf))
        if problem.dropout_rate:
            kept = jax.random.bernoulli(dropout_key(), 1 - problem.dropout_rate, scores.shape)
            probabilities = jnp.where(kept, probabilities / (1 - problem.dropout_rate), 0)
        return jnp.einsum("bnts,bsnh->btnh", probabilities.astype(query.dtype), value)

    return attention


def blockwise_attention(problem: Problem) -> Attention:
    """Returns `dense_attention` of a block of queries at a time, recomputed for the gradient."""
    sizes = range(min(problem.length, REFERENCE_ROWS), 0, -1)
    block = next(size for size in sizes if problem.length % size == 0)

    def attention(inputs: Inputs) -> jax.Array:
        def of_block(rows: jax.Array) -> jax.Array:
            return dense_attention(problem, rows)(inputs)

        blocks = jax.lax.map(
            jax.checkpoint(of_block), jnp.arange(problem.length).reshape(-1, block)
        )
        return jnp.moveaxis(blocks, 0, 1).reshape(inputs.query.shape)

    return attention


def jaxflash_attention(
    problem: Problem, implementation: Literal["native", "xla"] | None = None
) -> Attention:
    """Returns attention by jaxflash."""

    def attention(inputs: Inputs) -> jax.Array:
        query, key, value, bias, mask, segment_ids = inputs
        return flash_attention(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=problem.is_causal,
            local_window_size=problem.window,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            logits_soft_cap=problem.soft_cap,
            dropout_rate=problem.dropout_rate,
            dropout_key=dropout_key() if problem.dropout_rate else None,
            implementation=implementation,
        )

    return attention


def forward(attention: Attention, problem: Problem) -> Callable[[Arrays, Arrays], jax.Array]:
    """Returns the output as a function of the operands with and without gradient."""

    def function(operands: Arrays, constants: Arrays) -> jax.Array:
        inputs = Inputs(**operands, **constants)
        for _ in range(problem.repeats):
            inputs = inputs._replace(query=attention(inputs))
        return inputs.query

    return function


def linearize(attention: Attention) -> Callable[[Arrays, Arrays], tuple[jax.Array, Any]]:
    """Returns the output and the function, with its residuals, from its cotangent to gradients."""

    def function(operands: Arrays, constants: Arrays) -> tuple[jax.Array, Any]:
        def of_operands(operands: Arrays) -> jax.Array:
            return attention(Inputs(**operands, **constants))

        return jax.vjp(of_operands, operands)

    return function


def backward(problem: Problem) -> Callable[[Any, jax.Array], Arrays]:
    """Returns the gradients as a function of what `linearize` returns and the cotangent."""

    def function(pull: Any, cotangent: jax.Array) -> Arrays:
        gradients: Arrays = {}
        for _ in range(problem.repeats):
            (gradients,) = pull(cotangent)
            if problem.repeats > 1:  # of the output's shape where heads aren't grouped
                cotangent = gradients["value"]
        return gradients

    return function


def forward_and_backward(
    attention: Attention, problem: Problem
) -> Callable[[Arrays, Arrays, jax.Array], Arrays]:
    """Returns output and gradients as a function of operands, constants and cotangent."""

    def function(operands: Arrays, constants: Arrays, cotangent: jax.Array) -> Arrays:
        output, pull = linearize(attention)(operands, constants)
        if problem.repeats > 1:
            output = forward(attention, problem)(operands, constants)
        return {"output": output, **backward(problem)(pull, cotangent)}

    return function


def expected(problem: Problem) -> Callable[[Arrays, Arrays, jax.Array], Arrays]:
    """Returns what results are compared with, computed in float32 or, for float32, in float64.

    A function of the checked parts of operands, constants and cotangent. Only jaxflash itself
    knows which probabilities it drops: there it is jaxflash's implementation in pure JAX.
    """
    wide = jnp.float64 if problem.dtype == "float32" else jnp.float32
    attention = (
        jaxflash_attention(problem, "xla") if problem.dropout_rate else blockwise_attention(problem)
    )

    def function(operands: Arrays, constants: Arrays, cotangent: jax.Array) -> Arrays:
        operands = {name: array.astype(wide) for name, array in operands.items()}
        both = forward_and_backward(attention, problem)
        return both(operands, constants, cotangent.astype(wide))

    return function
