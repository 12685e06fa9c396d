"""How the primitives lower to the native kernels.

Custom calls `jaxflash_forward` and `jaxflash_backward`, the same names on every platform, have a
fixed list of operands and results. What is absent or unwanted is an empty array of bytes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxflash import _compat, _partition
from jaxflash._batch import MergedBatch
from jaxflash._modules import Module, unavailable_reason
from jaxflash._operands import (
    BACKWARD_OPERANDS,
    Config,
    Operands,
    Wanted,
    batch_shape,
    compute_dtype,
    cotangent_shape,
    reduce_to,
)
from jaxflash._platforms import BACKWARD, FORWARD, PLATFORMS, Call, Platform

Kernel = Callable[..., Sequence[jax.Array]]


@functools.cache
def _warn_once(message: str) -> None:
    """Warns, once a process for every message."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def register_lowerings(primitive: Primitive, native: Kernel, xla: Kernel) -> None:
    """Registers how a primitive lowers on every platform.

    Args:
      primitive: the primitive.
      native: function of the platform, its operands and parameters that calls the native kernel.
      xla: the same in JAX, without the platform.
    """
    lower_xla = mlir.lower_fun(xla, multiple_results=True)
    lower_native = {
        name: _lowering(primitive, functools.partial(native, platform), platform.module)
        for name, platform in PLATFORMS.items()
    }

    def lower(platform: str | None, context: Any, *operands: Any, **params: Any) -> Any:
        name = platform or ", ".join(context.platforms or context.module_context.platforms)
        implementation = params["config"].implementation
        if implementation == "xla":
            return lower_xla(context, *operands, **params)
        reason = why_not(name, context.avals_in, **params)
        if reason is None:
            return lower_native[name](context, *operands, **params)
        if implementation == "native":
            raise NotImplementedError(f'implementation="native": not on platform {name}: {reason}')
        _warn_once(
            f'jaxflash: on platform {name} the slower implementation "xla" is used: {reason}'
        )
        return lower_xla(context, *operands, **params)

    mlir.register_lowering(primitive, functools.partial(lower, None))
    for name in PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(lower, name), platform=name)


def _lowering(primitive: Primitive, native: Kernel, module: Module) -> Callable[..., Any]:
    """How a primitive lowers to the native kernels of a platform, on one device or on many."""
    lower_plainly = mlir.lower_fun(native, multiple_results=True)

    def lower(context: Any, *operands: Any, **params: Any) -> Any:
        if _compat.is_manual(context) or _compat.is_export(context):
            return lower_plainly(context, *operands, **params)
        mesh = _compat.mesh_of(context)
        run = functools.partial(_partition.partitioned, native, mesh)
        lower_partitioned = mlir.lower_fun(run, multiple_results=True)
        context = _compat.with_device_numbers(context)
        values = lower_partitioned(context, *operands, **params)
        # All that the call depends on, as the compilation cache sees nothing else of it.
        name = f"{module.name} {module.facts} {primitive} {params} {context.avals_in} {mesh}"
        _compat.name_partitioning(context, values[0], name)
        return values

    return lower


def why_not(
    platform: str, operands: Sequence[Any], config: Config, wanted: Wanted = ()
) -> str | None:
    """Why a call can't run native kernels on a platform; None where it can."""
    if reason := unavailable_reason(platform):
        return reason
    named = config.named(operands[: len(config.operands)])
    return PLATFORMS[platform].limitation(config, named, wanted)


def forward(platform: Platform, *operands: Any, config: Config) -> Sequence[jax.Array]:
    """Calls the forward kernel; operands and results of `forward_p`."""
    named = platform.readable(config.named(operands))
    query, value = named["query"], named["value"]
    rows, rank = query.shape[:-1], len(batch_shape(query))
    statistic = (rows, compute_dtype(query.dtype))
    results = {
        "output": ((*rows, value.shape[-1]), query.dtype),
        "logit_max": statistic,
        "log_sum": statistic,
    }
    batch = MergedBatch.of(
        batch_shape(query), [x.shape[:rank] for x in operands], platform.batch_axes
    )
    merged = {name: batch.merge(operand) for name, operand in named.items()}
    merged_results = {
        name: (batch.merged_shape(shape), dtype) for name, (shape, dtype) in results.items()
    }
    outputs = _run(platform, Call(FORWARD, config, merged, merged_results))
    return [outputs[name].reshape(shape) for name, (shape, _) in results.items()]


def backward(
    platform: Platform, *operands: Any, config: Config, wanted: Wanted
) -> Sequence[jax.Array]:
    """Calls the backward kernel; operands and results of `backward_p`."""
    count = len(config.operands)
    given = config.named(operands[:count])
    named = platform.readable(given)
    residuals = dict(zip(BACKWARD_OPERANDS, operands[count:], strict=True))
    query, rank = named["query"], len(batch_shape(named["query"]))
    shapes = {name: cotangent_shape(name, full, named) for name, full in wanted}
    if 0 in batch_shape(query):
        return [jnp.zeros(shapes[name], given[name].dtype) for name, _ in wanted]
    batch = MergedBatch.of(
        batch_shape(query),
        [shape[:rank] for shape in (*(x.shape for x in operands), *shapes.values())],
        platform.batch_axes,
    )
    merged = {name: batch.merge(x) for name, x in (named | residuals).items()}
    merged_shapes = {name: batch.merged_shape(shape) for name, shape in shapes.items()}
    _share_batch(merged_shapes, merged, batch.rank)
    results = {name: (shape, named[name].dtype) for name, shape in merged_shapes.items()}
    outputs = _run(platform, Call(BACKWARD, config, merged, results))
    cotangents = {name: batch.split(outputs[name], shape) for name, shape in shapes.items()}
    return [
        reduce_to(cotangents[name], shapes[name]).astype(given[name].dtype) for name, _ in wanted
    ]


def _share_batch(results: dict[str, tuple[int, ...]], operands: Operands, rank: int) -> None:
    """Gives the cotangents of key and value the same batch axes: the finest of both and of theirs.

    The kernel computes both in one pass over the batch rows that share a key and a value; what is
    to be summed beyond that is summed afterwards.
    """
    sides = [name for name in ("key", "value") if name in results]
    shapes = [results[name] for name in sides] + [operands[name].shape for name in ("key", "value")]
    shared = tuple(max(shape[axis] for shape in shapes) for axis in range(rank))
    for name in sides:
        results[name] = shared + results[name][rank:]


def _run(platform: Platform, call: Call) -> dict[str, jax.Array]:
    """The results of a custom call by name."""
    results = call.result_types() + platform.workspace(call)
    run = jax.ffi.ffi_call(call.target.name, results)
    outputs = run(*call.operand_list(), **platform.attributes(call))
    return dict(zip(call.target.results, outputs, strict=False))
