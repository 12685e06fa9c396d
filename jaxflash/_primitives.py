"""The three primitives: forward, its derivative, and the derivative's transpose.

`forward` returns output, logit_max and log_sum; the log-sum-exp is logit_max + log_sum. Both are
kept, because the log-sum-exp alone loses the probabilities of rows whose logits are around -1e6.
In derivatives logit_max is a constant reference, and log_sum carries the log-sum-exp's tangent.

`tangent` is linear in the tangents, and `backward` is its transpose. So reverse mode runs the
forward and the backward kernel, and forward mode and higher derivatives, which `jax.custom_vjp`
would refuse, run the blockwise `xla` implementation.

Operands are described in `_operands`; leading batch axes are of size 1 or full, so that batching
puts the mapped axis in front, of size 1 where an operand is not mapped: nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import PartitionSpec

from jaxflash import _compat, _native, _xla
from jaxflash._blocks import sink_weights
from jaxflash._operands import (
    BACKWARD_OPERANDS,
    DIFFERENTIABLE,
    Config,
    Wanted,
    batch_shape,
    compute_dtype,
    cotangent_shape,
    reduce_to,
)

# Names of the residuals for policies of `jax.checkpoint`.
OUTPUT_NAME = "flash_attention_output"
LSE_NAME = "flash_attention_lse"

_RESIDUALS = ("output", "logit_max", "log_sum")

Dims = Sequence[int | None]
"""The mapped axis of each operand or result; None where it is not mapped."""


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    @primitive.def_impl
    def _(*operands: Any, **params: Any) -> Any:
        # A log-sum-exp of minus infinity is no mistake: it is that of a row that sees nothing.
        with jax.debug_infs(False):
            return xla.apply_primitive(primitive, *operands, **params)

    return primitive


forward_p = _primitive("flash_attention_forward")
tangent_p = _primitive("flash_attention_tangent")
backward_p = _primitive("flash_attention_backward")


def attention(config: Config, operands: Sequence[Any]) -> Sequence[Any]:
    """Output, logit_max and log_sum; see `_xla.forward`."""
    query = config.named(operands)["query"]
    *rows, _ = jax.typeof(query).sharding.spec
    return _compat.with_automatic_axes(
        lambda *operands: tuple(_forward(config, operands)),
        operands,
        [PartitionSpec(*rows, None), PartitionSpec(*rows), PartitionSpec(*rows)],
    )


def _forward(config: Config, operands: Sequence[Any]) -> list[Any]:
    return forward_p.bind(*_compat.vary_alike(operands), config=config)


def _tangent(config: Config, operands: Sequence[Any], tangents: tuple[str, ...]) -> list[Any]:
    return tangent_p.bind(*_compat.vary_alike(operands), config=config, tangents=tangents)


def _backward(config: Config, operands: Sequence[Any], wanted: Wanted) -> list[Any]:
    return backward_p.bind(*_compat.vary_alike(operands), config=config, wanted=wanted)


# The implementations in `_xla` as functions of flat operands, as primitives have them.


def _xla_forward(*operands: Any, config: Config) -> Sequence[jax.Array]:
    return _xla.forward(config, config.named(operands))


def _xla_tangent(*operands: Any, config: Config, tangents: tuple[str, ...]) -> Sequence[jax.Array]:
    count = len(config.operands)
    primals, (output, *statistics) = operands[:count], operands[count : count + len(_RESIDUALS)]
    residuals = (output, *_xla_statistics(config, primals, *statistics))
    named_tangents = dict(zip(tangents, operands[count + len(_RESIDUALS) :], strict=True))
    return _xla.tangent(config, config.named(primals), residuals, named_tangents)


def _xla_backward(*operands: Any, config: Config, wanted: Wanted) -> Sequence[jax.Array]:
    count = len(config.operands)
    primals = config.named(operands[:count])
    residuals = dict(zip(BACKWARD_OPERANDS, operands[count:], strict=True))
    shapes = {name: cotangent_shape(name, full, primals) for name, full in wanted}
    results = _xla.backward(config, primals, residuals, shapes)
    return [results[name] for name, _ in wanted]


def _xla_backward_of_kernels(*operands: Any, config: Config, wanted: Wanted) -> Sequence[jax.Array]:
    count = len(config.operands)
    d_output, logit_max, log_sum, delta = operands[count:]
    statistics = _xla_statistics(config, operands[:count], logit_max, log_sum)
    operands = (*operands[:count], d_output, *statistics, delta)
    return _xla_backward(*operands, config=config, wanted=wanted)


def _xla_statistics(
    config: Config, primals: Sequence[Any], logit_max: Any, log_sum: Any
) -> tuple[Any, Any]:
    """A row's statistics as `_xla` finds them, with the derivatives of those given.

    Kernels round logits otherwise, and where these are huge, by more than the logarithm of a
    probability: what is computed by `_xla` goes with its own statistics.
    """
    if config.implementation == "xla":
        return logit_max, log_sum
    constants = jax.lax.stop_gradient(list(primals))
    _, own_max, own_sum = _xla.forward(config, config.named(constants))
    return own_max, own_sum + (log_sum - jax.lax.stop_gradient(log_sum))


# Abstract evaluation.


@forward_p.def_abstract_eval
def _(*operands: Any, config: Config) -> Sequence[Any]:
    named = config.named(operands)
    query, value = named["query"], named["value"]
    rows = query.shape[:-1]
    statistic = _compat.result_type(query, rows, compute_dtype(query.dtype))
    output = _compat.result_type(query, (*rows, value.shape[-1]), query.dtype)
    return output, statistic, statistic


@tangent_p.def_abstract_eval
def _(*operands: Any, config: Config, tangents: tuple[str, ...]) -> Sequence[Any]:
    del tangents
    count = len(config.operands)
    return operands[count], operands[count + 2]


@backward_p.def_abstract_eval
def _(*operands: Any, config: Config, wanted: Wanted) -> Sequence[Any]:
    named = config.named(operands[: len(config.operands)])
    return [
        _compat.result_type(
            named["query" if name == "scale" else name],
            cotangent_shape(name, full, named),
            named[name].dtype,
        )
        for name, full in wanted
    ]


# Differentiation.


def _nonzero(names: Sequence[str], tangents: Sequence[Any]) -> dict[str, Any]:
    """The tangents that are not symbolically zero."""
    return {
        name: tangent
        for name, tangent in zip(names, tangents, strict=True)
        if name in DIFFERENTIABLE and not isinstance(tangent, ad.Zero)
    }


def _forward_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, config: Config
) -> tuple[Sequence[Any], Sequence[Any]]:
    output, logit_max, log_sum = _forward(config, primals)
    output = checkpoint_name(output, OUTPUT_NAME)
    logit_max = checkpoint_name(logit_max, LSE_NAME)
    log_sum = checkpoint_name(log_sum, LSE_NAME)
    directions = _nonzero(config.operands, tangents)
    residuals = (output, logit_max, log_sum)
    d_output, d_lse = _tangent(
        config, (*primals, *residuals, *directions.values()), tuple(directions)
    )
    return residuals, (d_output, _compat.zero_tangent(logit_max), d_lse)


def _tangent_transpose(
    cotangents: Sequence[Any], *operands: Any, config: Config, tangents: tuple[str, ...]
) -> list[Any]:
    """Binds `backward_p` for the tangents that are linear; the others' cotangents are None."""
    count = len(config.operands) + len(_RESIDUALS)
    linear = [
        (name, tangent.aval)
        for name, tangent in zip(tangents, operands[count:], strict=True)
        if ad.is_undefined_primal(tangent)
    ]
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        results = {name: _compat.zero_cotangent(aval) for name, aval in linear}
    else:
        d_output, d_lse = map(ad.instantiate_zeros, cotangents)
        results = _transposed(config, operands[:count], d_output, d_lse, dict(linear))
    return [None] * count + [results.get(name) for name in tangents]


def _transposed(
    config: Config, operands: Sequence[Any], d_output: Any, d_lse: Any, linear: dict[str, Any]
) -> dict[str, Any]:
    """Cotangents by name for the tangents in `linear`, given those of output and log-sum-exp."""
    primals, (output, logit_max, log_sum) = operands[:-3], operands[-3:]
    named = config.named(primals)
    dtype, query = logit_max.dtype, named["query"]
    # A row that sees nothing contributes nothing, whatever its cotangents.
    seeing = logit_max != -jnp.inf
    product = jnp.where(seeing[..., None], d_output, 0).astype(dtype) * output.astype(dtype)
    delta = jnp.sum(product, axis=-1) - jnp.where(seeing, d_lse, 0)

    def full(name: str) -> tuple[bool, ...]:
        # Where the operand has the full batch the kernel cannot sum over it.
        shapes = zip(batch_shape(query), named[name].shape, linear[name].shape, strict=False)
        whole = name in ("query", "scale")
        return tuple(whole or size in (mine, its) for size, mine, its in shapes)

    wanted = tuple((name, full(name)) for name in linear if name != "sinks")
    results = {}
    if wanted:
        residuals = (d_output, logit_max, log_sum, delta)
        cotangents = _backward(config, (*primals, *residuals), wanted)
        results = dict(zip((name for name, _ in wanted), cotangents, strict=True))
    if "scale" in results:
        results["scale"] = jnp.sum(results["scale"], axis=(-2, -1))
    if "sinks" in linear:
        weights = sink_weights(named["sinks"][..., None, :], logit_max, log_sum)
        results["sinks"] = jnp.sum(-weights * delta, axis=-2)
    return {name: reduce_to(result, linear[name].shape) for name, result in results.items()}


@functools.partial(jax.jit, static_argnames=("function", "positions", "params"))
def _xla_jvp(
    function: Callable[..., Sequence[jax.Array]],
    operands: Sequence[Any],
    tangents: tuple[Any, ...],
    positions: tuple[int, ...],
    params: tuple[tuple[str, Any], ...],
) -> Sequence[jax.Array]:
    """The derivative of one of the functions above, through its own program.

    Compiled, so that a call outside `jit` finds its loops in the cache.
    """

    def of_some(*some: Any) -> tuple[jax.Array, ...]:
        filled = list(operands)
        for position, operand in zip(positions, some, strict=True):
            filled[position] = operand
        return tuple(function(*filled, **dict(params)))

    return jax.jvp(of_some, tuple(operands[position] for position in positions), tangents)[1]


def _jvp_through_xla(
    function: Callable[..., Sequence[jax.Array]],
    operands: Sequence[Any],
    tangents: dict[int, Any],
    params: dict[str, Any],
) -> Sequence[jax.Array]:
    """Tangents of `function(*operands, **params)`; `tangents` are by position."""
    operands = _compat.vary_alike(operands)
    directions = _compat.vary_alike(list(tangents.values()), like=operands)
    static = tuple(params.items())
    return _xla_jvp(function, operands, tuple(directions), tuple(tangents), static)


def _by_position(tangents: Sequence[Any]) -> dict[int, Any]:
    return {
        position: tangent
        for position, tangent in enumerate(tangents)
        if not isinstance(tangent, ad.Zero) and tangent.dtype != jax.dtypes.float0
    }


def _tangent_jvp(
    primals: Sequence[Any],
    tangents_in: Sequence[Any],
    *,
    config: Config,
    tangents: tuple[str, ...],
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Linear in the tangents, so these keep their own transpose; through `xla` in the rest."""
    params = {"config": config, "tangents": tangents}
    results = _tangent(config, primals, tangents)
    count = len(config.operands) + len(_RESIDUALS)
    terms = []
    linear = _nonzero(tangents, tangents_in[count:])
    if linear:
        terms.append(_tangent(config, (*primals[:count], *linear.values()), tuple(linear)))
    nonlinear = _by_position(tangents_in[:count])
    if nonlinear:
        terms.append(_jvp_through_xla(_xla_tangent, primals, nonlinear, params))
    return results, [functools.reduce(ad.add_jaxvals, term) for term in zip(*terms, strict=True)]


def _backward_jvp(
    primals: Sequence[Any], tangents_in: Sequence[Any], *, config: Config, wanted: Wanted
) -> tuple[Sequence[Any], Sequence[Any]]:
    results = _backward(config, primals, wanted)
    params = {"config": config, "wanted": wanted}
    directions = _by_position(tangents_in)
    return results, list(_jvp_through_xla(_xla_backward_of_kernels, primals, directions, params))


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_jvps[backward_p] = _backward_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose


# Batching.


def _batched(operands: Sequence[Any], dims: Dims, full: Sequence[int]) -> list[Any]:
    """Puts the mapped axis in front, of size 1 where not mapped; expanded for positions `full`."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    result = []
    for position, (operand, dim) in enumerate(zip(operands, dims, strict=True)):
        operand = operand[None] if dim is None else jnp.moveaxis(operand, dim, 0)
        if dim is None and position in full:
            operand = jnp.broadcast_to(operand, (size, *operand.shape[1:]))
        result.append(operand)
    return result


def _forward_batch(
    operands: Sequence[Any], dims: Dims, *, config: Config
) -> tuple[Sequence[Any], Dims]:
    operands = _batched(operands, dims, full=[config.operands.index("query")])
    return _forward(config, operands), [0] * 3


def _with_residuals(config: Config, count: int) -> list[int]:
    first = len(config.operands)
    return [config.operands.index("query"), *range(first, first + count)]


def _tangent_batch(
    operands: Sequence[Any], dims: Dims, *, config: Config, tangents: tuple[str, ...]
) -> tuple[Sequence[Any], Dims]:
    operands = _batched(operands, dims, full=_with_residuals(config, len(_RESIDUALS)))
    return _tangent(config, operands, tangents), [0] * 2


def _backward_batch(
    operands: Sequence[Any], dims: Dims, *, config: Config, wanted: Wanted
) -> tuple[Sequence[Any], Dims]:
    operands = _batched(operands, dims, full=_with_residuals(config, len(BACKWARD_OPERANDS)))
    wanted = tuple((name, (True, *full)) for name, full in wanted)
    return _backward(config, operands, wanted), [0] * len(wanted)


batching.primitive_batchers[forward_p] = _forward_batch
batching.primitive_batchers[tangent_p] = _tangent_batch
batching.primitive_batchers[backward_p] = _backward_batch


# Lowering.

mlir.register_lowering(tangent_p, mlir.lower_fun(_xla_tangent, multiple_results=True))
_native.register_lowerings(forward_p, _native.forward, _xla_forward)
_native.register_lowerings(backward_p, _native.backward, _xla_backward)
