"""Blockwise attention in pure JAX: forward, tangent and backward in O(B*N*T) memory.

It runs on every platform JAX has, and is what the primitives are differentiated through a second
time, so that `tangent` and `backward` must themselves be differentiable: bodies of loops are
rematerialised, and every `where` is guarded on both sides, so that no NaN or infinity of an
unselected branch reaches a gradient.

How operands are cut into blocks is described in `_blocks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxflash._blocks import Block, BlockedAttention, below, rematerialised
from jaxflash._operands import Config, Operands

P = ParamSpec("P")
R = TypeVar("R")


def _with_settings(
    function: Callable[Concatenate[Config, P], R],
) -> Callable[Concatenate[Config, P], R]:
    """Traces `function(config, ...)` under the settings of JAX that it is written for.

    The matmul precision is that which the call was made with. Ranks are promoted as in NumPy, also
    where users forbid it to their own code.
    """

    @functools.wraps(function)
    def wrapped(config: Config, *args: P.args, **kwargs: P.kwargs) -> R:
        precision = jax.default_matmul_precision(config.precision)
        with precision, jax.numpy_rank_promotion("allow"):
            return function(config, *args, **kwargs)

    return wrapped


@_with_settings
def forward(config: Config, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of every row.

    Returns:
      output `[*b, T, N, Hv]` in the query's dtype; logit_max `[*b, T, N]`, a number near the row's
      greatest logit, -inf where the row sees nothing; log_sum `[*b, T, N]`, the logarithm of
      sum_j exp(logit_j - logit_max), 0 where the row sees nothing. The latter two have the compute
      dtype.
    """
    problem = BlockedAttention(config, operands)
    if not problem.row_count:
        shape = operands["query"].shape[:-1]
        output = problem.zeros_of((*shape, operands["value"].shape[-1]), problem.dtype)
        return output, problem.zeros_of(shape), problem.zeros_of(shape)

    def row_body(row: Block) -> tuple[jax.Array, ...]:
        row = problem.load_row(row)

        def column_body(carry: Any, column: Block) -> tuple[jax.Array, ...]:
            accumulator, row_max, row_sum = carry
            logits, visible, _ = problem.logits(row, column)
            logits = jnp.where(visible, logits, -jnp.inf)
            new_max = jnp.maximum(row_max, jnp.max(logits, axis=-1))
            # Where nothing was seen yet any finite reference does: the exponentials are all 0.
            reference = jnp.where(new_max == -jnp.inf, 0, new_max)
            weights = jnp.exp(below(logits, reference[..., None]))
            shrink = jnp.exp(row_max - reference)
            row_sum = row_sum * shrink + jnp.sum(weights, axis=-1)
            weights = problem.drop(weights, row, column)
            update = problem.dot("kgqs,skv->kgqv", weights, column["value"])
            return accumulator * shrink[..., None] + update, new_max, row_sum

        init = (problem.zeros("v"), *problem.initial_statistics(row))
        accumulator, row_max, row_sum = problem.scan_columns(column_body, init, row)
        # Compilers' maxima pass over NaN: a row of nothing else is not one that sees nothing.
        row_max = jnp.where(jnp.isnan(row_sum), row_sum, row_max)
        row_sum = jnp.where(row_max == -jnp.inf, 1, row_sum)
        output = (accumulator / row_sum[..., None]).astype(problem.dtype)
        return tuple(map(problem.to_rows, (output, row_max, jnp.log(row_sum))))

    output, logit_max, log_sum = problem.map_rows(row_body)
    return output, logit_max, log_sum


@_with_settings
def tangent(
    config: Config,
    operands: Operands,
    residuals: Sequence[jax.Array],
    tangents: Operands,
) -> tuple[jax.Array, jax.Array]:
    """The derivative of (output, log-sum-exp) in the direction of `tangents`, linear in them.

    Args:
      config: what is static.
      operands: operands of the forward pass.
      residuals: its results output, logit_max, log_sum.
      tangents: tangents of some of the differentiable operands; batch axes of size 1 or full.

    Returns:
      d_output `[*b, T, N, Hv]` in the query's dtype, d_lse `[*b, T, N]` in the compute dtype.
    """
    problem = BlockedAttention(config, operands)
    output, logit_max, log_sum = residuals
    if not problem.row_count:
        return output, log_sum
    row_arrays = {"output": output, "logit_max": logit_max, "log_sum": log_sum}
    column_arrays = {f"d_{name}": tangents[name] for name in ("key", "value") if name in tangents}
    if "query" in tangents:
        row_arrays["d_query"] = tangents["query"]

    def row_body(row: Block) -> tuple[jax.Array, ...]:
        row = problem.load_row(row)
        d_scaled_query = problem.scaled_query_tangent(row, tangents.get("scale"))

        def column_body(carry: Any, column: Block) -> tuple[jax.Array, ...]:
            d_output, d_lse = carry
            weights, visible, slope = problem.weights(row, column)
            d_logits = jnp.zeros_like(weights)
            if d_scaled_query is not None:
                d_logits += problem.dot("qkgh,skh->kgqs", d_scaled_query, column["key"])
            if "d_key" in column:
                d_products = problem.dot("qkgh,skh->kgqs", row["query"], column["d_key"])
                d_logits += d_products * problem.per_batch("scale", 4)
            d_logits *= slope
            if "bias" in tangents:
                d_bias = problem.pair_block(tangents["bias"], row, column)
                d_logits += d_bias.astype(d_logits.dtype)
            d_logits = jnp.where(visible, d_logits, 0)
            dropped = problem.drop(weights, row, column)
            d_lse += jnp.sum(weights * d_logits, axis=-1)
            d_output += problem.dot("kgqs,skv->kgqv", dropped * d_logits, column["value"])
            if "d_value" in column:
                d_output += problem.dot("kgqs,skv->kgqv", dropped, column["d_value"])
            return d_output, d_lse

        init = (problem.zeros("v"), problem.zeros(""))
        d_output, d_lse = problem.scan_columns(column_body, init, row, column_arrays)
        if "sinks" in tangents:
            d_sinks = problem.split_heads(tangents["sinks"], -1)[..., None]
            d_lse += problem.sink_weights(row) * d_sinks
        d_output -= d_lse[..., None] * problem.from_rows(row["output"])
        return problem.to_rows(d_output.astype(problem.dtype)), problem.to_rows(d_lse)

    d_output, d_lse = problem.map_rows(row_body, row_arrays)
    return d_output, d_lse


@_with_settings
def backward(
    config: Config,
    operands: Operands,
    residuals: Operands,
    wanted: dict[str, tuple[int, ...]],
) -> Operands:
    """The cotangents of query, key, value, bias and scale, those that are wanted.

    Args:
      config: what is static.
      operands: operands of the forward pass.
      residuals: `output_cotangent` `[*b, T, N, Hv]`; `logit_max`, `log_sum`, `delta` `[*b, T, N]`
        in the compute dtype, delta_i = sum_h d_output_ih output_ih - d_lse_i.
      wanted: names and shapes of the cotangents; of key, value and bias the batch axes may be 1
        where the operand's are: the sum.

    Returns:
      The cotangents by name in their operands' dtypes; that of the scale is `[*b, T, N]` in the
      compute dtype, still to be summed.
    """
    problem = BlockedAttention(config, operands)
    if not (problem.row_count and problem.column_count):
        return {
            name: problem.zeros_of(shape, operands[name].dtype) for name, shape in wanted.items()
        }
    keep = {name: wanted[name][: problem.rank] for name in ("key", "value") if name in wanted}
    parts = {"query" if name == "scale" else name for name in wanted}
    rows = problem.row_blocks(residuals)
    row_sums = problem.zeros_of(rows["query"].shape) if "query" in parts else None
    bias_sum = problem.zeros_of(wanted["bias"]) if "bias" in parts else None

    def column_body(carry: Any, column: Block) -> tuple[Any, Block]:
        column = problem.load_column(column)

        def row_body(carry: Any, inputs: Any) -> Any:
            row, row_sum = inputs

            def run() -> Any:
                part = _pair_cotangents(problem, problem.load_row(row), column, keep, parts)
                column_sum, bias_sum = carry
                column_sum = {name: total + part[name] for name, total in column_sum.items()}
                if bias_sum is not None:
                    bias_sum = problem.add_pair_block(bias_sum, part["bias"], row, column)
                return (column_sum, bias_sum), row_sum if row_sum is None else row_sum + part[
                    "query"
                ]

            return problem.if_seen(row, column, run, (carry, row_sum))

        row_sums, bias_sum = carry
        column_sum = {
            name: problem.zeros_of((*batch, *column[name].shape[problem.rank :]))
            for name, batch in keep.items()
        }
        (column_sum, bias_sum), row_sums = lax.scan(
            rematerialised(row_body), (column_sum, bias_sum), (rows, row_sums)
        )
        return (row_sums, bias_sum), column_sum

    (row_sums, bias_sum), column_sums = lax.scan(
        rematerialised(column_body), (row_sums, bias_sum), problem.column_blocks()
    )
    results = {
        name: problem.merge(blocks, problem.column_count) for name, blocks in column_sums.items()
    }
    if bias_sum is not None:
        results["bias"] = bias_sum
    if row_sums is not None:
        d_scaled_query = problem.merge(row_sums, problem.row_count)
        results["query"] = d_scaled_query * problem.per_batch("scale", 3)
        # A row that sees nothing contributes nothing, whatever its query.
        seeing = residuals["logit_max"][..., None] != -jnp.inf
        query = jnp.where(seeing, operands["query"], 0).astype(d_scaled_query.dtype)
        results["scale"] = jnp.sum(d_scaled_query * query, axis=-1)
    return {name: results[name].astype(operands[name].dtype) for name in wanted}


def _pair_cotangents(
    problem: BlockedAttention,
    row: Block,
    column: Block,
    keep: dict[str, tuple[int, ...]],
    parts: set[str],
) -> Block:
    """What a block of rows and a block of columns give to the cotangents named in `parts`.

    Args:
      problem: the whole.
      row: loaded block of rows, with the residuals of the backward pass.
      column: loaded block of columns.
      keep: batch axes of the parts of key and value.
      parts: names; "query" is the cotangent of scale * query, "bias" that of the logits
        `[*b, K, G, rows, columns]`.
    """
    weights, _, slope = problem.weights(row, column)
    d_output = row["output_cotangent"]
    result = {}
    if "value" in parts:
        dropped = problem.drop(weights, row, column)
        result["value"] = problem.dot("kgqs,qkgv->skv", dropped, d_output, keep["value"])
    if parts == {"value"}:
        return result
    d_weights = problem.dot("qkgv,skv->kgqs", d_output, column["value"])
    d_weights = problem.drop(d_weights, row, column)
    d_logits = weights * (d_weights - problem.from_rows(row["delta"])[..., None])
    if "bias" in parts:
        result["bias"] = d_logits
    d_logits *= slope
    if "key" in parts:
        d_products = d_logits * problem.per_batch("scale", 4)
        result["key"] = problem.dot("kgqs,qkgh->skh", d_products, row["query"], keep["key"])
    if "query" in parts:
        d_query = problem.dot("kgqs,skh->kgqh", d_logits, column["key"])
        result["query"] = problem.to_rows(d_query)
    return result
