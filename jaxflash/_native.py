"""The native kernels: whether they are there, and how the primitives lower to them.

Custom calls `jaxflash_forward` and `jaxflash_backward`, the same names on every platform, have a
fixed list of operands and results. What is absent or unwanted is an empty array of bytes.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxflash import _compat
from jaxflash._batch import MergedBatch
from jaxflash._operands import (
    BACKWARD_OPERANDS,
    FORWARD_OPERANDS,
    Config,
    Operands,
    Wanted,
    batch_shape,
    compute_dtype,
    cotangent_shape,
    reduce_to,
)

FORWARD_TARGET = "jaxflash_forward"
BACKWARD_TARGET = "jaxflash_backward"

_COTANGENTS = ("query", "key", "value", "bias", "scale")

# Parallel tasks that the keys of one (batch, key/value head) are dealt to: no more than this, and
# none with fewer keys than a tile of the kernel has.
_MAX_CHUNKS = 4
_TILE_KEYS = 128


@dataclass(frozen=True)
class Module:
    """A compiled module, or why it is not used.

    Attributes:
      name: its full name.
      facts: what it says of its build; None where it could not be loaded.
      reason: why its kernels are not used; None where they are.
    """

    name: str
    facts: dict[str, Any] | None
    reason: str | None


def jaxlib_version() -> str:
    """The version of the jaxlib that is running."""
    return metadata.version("jaxlib")


def runtime_ffi_version() -> tuple[int, int]:
    """The XLA FFI version of the jaxlib that is running, from the headers that it ships."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(match.group(1))
        for part in ("MAJOR", "MINOR")
        if (match := re.search(rf"#define XLA_FFI_API_{part} (\d+)", header))
    )
    return major, minor


def _load(name: str, platform: str) -> Module:
    """Imports a compiled module and registers its custom calls for a platform."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        reason = (
            f"{name} was not built into {Path(__file__).parent}; `pip install .` in the source "
            "builds it (import jaxflash from another folder then, or install it with -e)"
        )
        return Module(name, None, reason)
    except ImportError as error:
        return Module(name, None, f"{name} could not be loaded: {error}")
    facts = module.build_facts()
    built, running = tuple(facts["xla_ffi_api"]), runtime_ffi_version()
    if built > running:
        # Registered all the same it would take down the whole backend at the first JAX call.
        reason = (
            f"{name} was compiled for XLA FFI {built[0]}.{built[1]}, newer than the "
            f"{running[0]}.{running[1]} of jaxlib {jaxlib_version()}: "
            "install a newer jaxlib, or build jaxflash with this one"
        )
        return Module(name, facts, reason)
    targets = module.registrations()
    for target, handler in targets.items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    missing = {FORWARD_TARGET, BACKWARD_TARGET} - set(targets)
    return Module(name, facts, f"{name} has no kernels yet" if missing else None)


MODULES = {platform: _load(f"jaxflash._{platform}", platform) for platform in ("cpu", "cuda")}

# A CPU module that is there and cannot be used is a broken installation; CUDA is optional.
if MODULES["cpu"].facts and MODULES["cpu"].reason:
    raise ImportError(MODULES["cpu"].reason)


def unavailable_reason(platform: str) -> str | None:
    """Why there are no native kernels for a platform; None where there are."""
    if platform not in MODULES:
        return "they exist for " + " and ".join(MODULES)
    return MODULES[platform].reason


def check_available() -> None:
    """Raises where no platform has native kernels.

    Raises:
      NotImplementedError: with the reasons.
    """
    reasons = [module.reason for module in MODULES.values()]
    if all(reasons):
        raise NotImplementedError(
            'implementation="native": no native kernels here: ' + "; ".join(map(str, reasons))
        )


@functools.cache
def warn_once(message: str) -> None:
    """Warns, once a process for every message."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def register_lowerings(primitive: Primitive, native: Callable, xla: Callable) -> None:
    """Registers how a primitive lowers on every platform.

    Args:
      primitive: the primitive.
      native: function of its operands and parameters that calls the native kernel.
      xla: the same in JAX.
    """
    lower_native = mlir.lower_fun(native, multiple_results=True)
    lower_xla = mlir.lower_fun(xla, multiple_results=True)

    def lower(platform: str | None, context, *operands, **params):
        name = platform or ", ".join(context.platforms or context.module_context.platforms)
        implementation = params["config"].implementation
        reason = unavailable_reason(name)
        if implementation == "xla":
            return lower_xla(context, *operands, **params)
        if reason is None:
            return lower_native(context, *operands, **params)
        if implementation == "native":
            raise NotImplementedError(
                f'implementation="native": no native kernels for platform {name}: {reason}'
            )
        warn_once(
            f"jaxflash: no native kernels for platform {name}, the slower implementation "
            f'"xla" is used: {reason}'
        )
        return lower_xla(context, *operands, **params)

    mlir.register_lowering(primitive, functools.partial(lower, None))
    for platform in MODULES:
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)


def forward(*operands, config: Config) -> Sequence[jax.Array]:
    """Calls the forward kernel; operands and results of `forward_p`."""
    named = config.named(operands)
    query, value = named["query"], named["value"]
    rows = query.shape[:-1]
    statistic = (rows, compute_dtype(query.dtype))
    results = [((*rows, value.shape[-1]), query.dtype), statistic, statistic]
    rank = len(batch_shape(query))
    batch = MergedBatch.of(batch_shape(query), [x.shape[:rank] for x in operands])
    merged = {name: batch.merge(operand) for name, operand in named.items()}
    outputs = _call(
        FORWARD_TARGET,
        config,
        _in_order(merged, FORWARD_OPERANDS),
        [_like(query, batch.merged_shape(shape), dtype) for shape, dtype in results],
    )
    return [output.reshape(shape) for output, (shape, _) in zip(outputs, results, strict=True)]


def backward(*operands, config: Config, wanted: Wanted) -> Sequence[jax.Array]:
    """Calls the backward kernel; operands and results of `backward_p`."""
    count = len(config.operands)
    named = config.named(operands[:count])
    residuals = dict(zip(BACKWARD_OPERANDS, operands[count:], strict=True))
    query, rank = named["query"], len(batch_shape(named["query"]))
    shapes = {name: cotangent_shape(name, full, named) for name, full in wanted}
    if 0 in batch_shape(query):
        return [jnp.zeros(shapes[name], named[name].dtype) for name, _ in wanted]
    batch = MergedBatch.of(
        batch_shape(query),
        [shape[:rank] for shape in (*(x.shape for x in operands), *shapes.values())],
    )
    merged = {name: batch.merge(x) for name, x in (named | residuals).items()}
    results = {name: batch.merged_shape(shape) for name, shape in shapes.items()}
    _share_batch(results, merged, batch.rank)
    order = (*FORWARD_OPERANDS, *BACKWARD_OPERANDS)
    outputs = _call(
        BACKWARD_TARGET,
        config,
        _in_order(merged, order),
        [
            _like(query, results[name], merged[name].dtype) if name in results else _absent(query)
            for name in _COTANGENTS
        ]
        + [_workspace(merged, results, batch.rank)],
    )
    by_name: Operands = dict(zip(_COTANGENTS, outputs, strict=False))
    return [reduce_to(batch.split(by_name[name], shapes[name]), shapes[name]) for name, _ in wanted]


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


def _workspace(operands: Operands, results: dict[str, tuple[int, ...]], rank: int) -> Any:
    """The type of the buffer `[chunks, *b, T, N, H]` for sums of the query's cotangent.

    None is needed where the query's cotangent itself can hold them.
    """
    query, key = operands["query"], operands["key"]
    if "query" not in results and "scale" not in results:
        return _absent(query)
    # A task sums over the batch axes that the cotangents of key and value don't have.
    summed = results.get("key") or results.get("value") or query.shape
    tasks = int(np.prod(summed[:rank], dtype=np.int64)) * key.shape[-2]
    chunks = _chunks(tasks, key.shape[-3])
    dtype = compute_dtype(query.dtype)
    if chunks == 1 and query.dtype == dtype and "query" in results:
        return _absent(query)
    return _like(query, (chunks, *query.shape), dtype)


def _chunks(tasks: int, key_length: int) -> int:
    """How many tasks share the keys of one, so that there is work for every processor."""
    processors = _processors()
    enough = -(-processors // max(tasks, 1))
    return max(1, min(enough, _MAX_CHUNKS, -(-key_length // _TILE_KEYS)))


def _processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_order(operands: Operands, names: Sequence[str] | Any) -> list[jax.Array]:
    """The operands in the handler's order, empty arrays for those that are absent."""
    empty = jnp.zeros(0, jnp.uint8)
    return [operands.get(name, empty) for name in names]


def _like(query: jax.Array, shape: Sequence[int], dtype: Any) -> Any:
    """The type of a result: varies over a mesh as the query does."""
    return _compat.result_type(jax.typeof(query), shape, dtype)


def _absent(query: jax.Array) -> Any:
    """The type of a result that is not wanted."""
    return _like(query, (0,), jnp.uint8)


def _call(target: str, config: Config, operands: list[jax.Array], results: list[Any]) -> Any:
    """Calls a handler. Its attributes are typed strictly: int64 and float64."""
    return jax.ffi.ffi_call(target, results)(
        *operands,
        window_left=np.int64(config.window_left),
        window_right=np.int64(config.window_right),
        soft_cap=np.float64(config.soft_cap),
        dropout_threshold=np.int64(config.dropout_threshold),
    )
