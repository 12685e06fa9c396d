"""The attention problems of the GPU benchmark, their operands, and what their results should be."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from flops import attention_flops
from jaxflash import flash_attention

DOCUMENTS = 8
VISIBLE_SHARE = 0.9
SOFT_CAP = 50.0
DROPOUT_RATE = 0.1
FEATURES = (
    "plain",
    "bias [1,N,T,S]",
    "bias [B,N,T,S]",
    "8 documents",
    "mask [B,1,T,S]",
    "dropout 0.1",
    "soft cap 50",
)

Implementation = Literal["native", "xla"] | None
Operands = dict[str, jax.Array]
Specs = dict[str, jax.ShapeDtypeStruct]
Attention = Callable[..., jax.Array]
"""Function of query, key, value and, by name, of bias, mask and segment_ids where there are any."""


@dataclass(frozen=True)
class Problem:
    """Self-attention of `batch` sequences.

    Attributes:
      feature: one of `FEATURES`.
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
    repeats: int = 1

    @property
    def soft_cap(self) -> float | None:
        return SOFT_CAP if self.feature.startswith("soft cap") else None

    @property
    def dropout_rate(self) -> float:
        return DROPOUT_RATE if self.feature.startswith("dropout") else 0.0

    @property
    def sequence(self) -> jax.ShapeDtypeStruct:
        """The type of query, key, value, output and its cotangent."""
        shape = (self.batch, self.length, self.heads, self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    def differentiable(self) -> Specs:
        """The types of the operands that have a gradient."""
        specs: Specs = {name: self.sequence for name in ("query", "key", "value")}
        if self.feature.startswith("bias"):
            batch = 1 if "[1," in self.feature else self.batch
            shape = (batch, self.heads, self.length, self.length)
            specs["bias"] = jax.ShapeDtypeStruct(shape, self.sequence.dtype)
        return specs

    def constants(self) -> Specs:
        """The types of the operands that have none."""
        if self.feature.startswith("mask"):
            shape = (self.batch, 1, self.length, self.length)
            return {"mask": jax.ShapeDtypeStruct(shape, jnp.dtype(bool))}
        if self.feature.endswith("documents"):
            return {"segment_ids": jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32)}
        return {}

    def flops(self, direction: str) -> int:
        """FLOP of a call, backward without forward; of documents, what they see of themselves."""
        documents = DOCUMENTS if self.feature.endswith("documents") else 1
        sizes = {
            "batch": self.batch * documents,
            "query_length": self.length // documents,
            "key_length": self.length // documents,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "is_causal": self.is_causal,
        }
        forward = attention_flops(**sizes)
        if direction == "forward":
            return forward
        return attention_flops(**sizes, backward=True) - forward

    def checked_part(self) -> Callable[[str, jax.Array], jax.Array]:
        """Returns what takes the part of an operand, or its gradient, that is checked.

        One head, of one batch row where none shares a gradient with it.
        """
        rows = self.batch if self.feature == "bias [1,N,T,S]" else 1

        def part(name: str, array: jax.Array) -> jax.Array:
            if name in ("bias", "mask"):
                return array[:rows, :1]
            return array[:rows] if name == "segment_ids" else array[:rows, :, :1]

        return part


def dropout_key() -> jax.Array:
    return jax.random.key(7)


@functools.partial(jax.jit, static_argnames=("count", "dtype"))
def _normals(key: jax.Array, count: int, dtype: Any) -> jax.Array:
    return jax.random.normal(key, (count,), jnp.float32).astype(dtype)


def normals(seed: int, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Random normal numbers; arrays of one size share the program that draws them."""
    return _normals(jax.random.key(seed), spec.size, spec.dtype).reshape(spec.shape)


def make_operands(problem: Problem) -> tuple[Operands, Operands, jax.Array]:
    """Returns the operands with a gradient, those without, and the output's cotangent."""
    specs = problem.differentiable()
    arrays = {name: normals(seed, spec) for seed, (name, spec) in enumerate(specs.items())}
    constants = {}
    for name, spec in problem.constants().items():
        if name == "mask":
            constants[name] = jax.random.bernoulli(jax.random.key(5), VISIBLE_SHARE, spec.shape)
        else:
            ids = jnp.arange(problem.length, dtype=jnp.int32) * DOCUMENTS // problem.length
            constants[name] = jnp.broadcast_to(ids, spec.shape)
    return arrays, constants, normals(6, problem.sequence)


def same_document(segment_ids: jax.Array) -> jax.Array:
    """Segment ids `[B, T]` as a mask `[B, 1, T, T]`."""
    return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]


def dense_attention(problem: Problem) -> Attention:
    """Returns attention as the formula says it, of every feature; scores in float32 or wider."""

    def attention(query, key, value, bias=None, mask=None, segment_ids=None):
        wide = jnp.promote_types(query.dtype, jnp.float32)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=wide)
        scores *= problem.head_dim**-0.5
        if problem.soft_cap:
            scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
        if bias is not None:
            scores += bias.astype(wide)
        visible = jnp.tri(problem.length, dtype=bool) if problem.is_causal else True
        if mask is not None:
            visible &= mask
        if segment_ids is not None:
            visible &= same_document(segment_ids)
        probabilities = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        if problem.dropout_rate:
            kept = jax.random.bernoulli(dropout_key(), 1 - problem.dropout_rate, scores.shape)
            probabilities = jnp.where(kept, probabilities / (1 - problem.dropout_rate), 0)
        return jnp.einsum("bnts,bsnh->btnh", probabilities.astype(query.dtype), value)

    return attention


def jaxflash_attention(problem: Problem, implementation: Implementation) -> Attention:
    """Returns attention by jaxflash."""

    def attention(query, key, value, bias=None, mask=None, segment_ids=None):
        return flash_attention(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=problem.is_causal,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            logits_soft_cap=problem.soft_cap,
            dropout_rate=problem.dropout_rate,
            dropout_key=dropout_key() if problem.dropout_rate else None,
            implementation=implementation,
        )

    return attention


def expected_attention(problem: Problem) -> Attention:
    """Returns what results are compared with.

    Only jaxflash itself knows which probabilities it drops: there its pure JAX implementation.
    """
    if problem.dropout_rate:
        return jaxflash_attention(problem, "xla")
    return dense_attention(problem)


def forward(attention: Attention, problem: Problem) -> Callable:
    """Returns the output as a function of the operands with and without gradient."""

    def function(operands: Operands, constants: Operands) -> jax.Array:
        query = operands["query"]
        for _ in range(problem.repeats):
            query = attention(**{**operands, "query": query}, **constants)
        return query

    return function


def linearize(attention: Attention) -> Callable:
    """Returns the output and the function, with its residuals, from its cotangent to gradients."""

    def function(operands: Operands, constants: Operands) -> tuple[jax.Array, Any]:
        return jax.vjp(lambda operands: attention(**operands, **constants), operands)

    return function


def backward(problem: Problem) -> Callable:
    """Returns the gradients as a function of what `linearize` returns and the cotangent."""

    def function(pull: Any, cotangent: jax.Array) -> Operands:
        gradients = {}
        for _ in range(problem.repeats):
            (gradients,) = pull(cotangent)
            cotangent = gradients["value"]
        return gradients

    return function


def expected(problem: Problem) -> Callable:
    """Returns output and gradients of the checked part as a function of the part's operands."""
    wide = jnp.float64 if problem.dtype == "float32" else jnp.float32

    def function(operands: Operands, constants: Operands, cotangent: jax.Array):
        attention = expected_attention(problem)
        operands = {name: array.astype(wide) for name, array in operands.items()}
        output = forward(attention, problem)(operands, constants)
        _, pull = linearize(attention)(operands, constants)
        return output, backward(problem)(pull, cotangent.astype(wide))

    return function
