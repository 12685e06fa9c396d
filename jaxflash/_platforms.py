"""What differs between the native platforms: workspace, attributes, and what kernels can't do."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash import _compat
from jaxflash._modules import BACKWARD_TARGET, FORWARD_TARGET, MODULES, Module
from jaxflash._operands import (
    BACKWARD_OPERANDS,
    FORWARD_OPERANDS,
    Config,
    Operands,
    Wanted,
    batch_shape,
    compute_dtype,
    cotangent_shape,
    is_static,
)

Attributes = dict[str, np.int64 | np.float64]


@dataclass(frozen=True)
class Target:
    """A custom call: its name, and its operands and results in order (without the workspace)."""

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]


FORWARD = Target(FORWARD_TARGET, tuple(FORWARD_OPERANDS), ("output", "logit_max", "log_sum"))
BACKWARD = Target(
    BACKWARD_TARGET,
    (*FORWARD_OPERANDS, *BACKWARD_OPERANDS),
    ("query", "key", "value", "bias", "scale"),
)


@dataclass(frozen=True)
class Call:
    """One custom call, up to what its platform adds.

    Attributes:
      target: what is called.
      config: what is static.
      operands: those that are there by name, batch axes merged.
      results: shapes of those that are wanted by name, and their dtypes.
    """

    target: Target
    config: Config
    operands: Operands
    results: Mapping[str, tuple[tuple[int, ...], Any]]

    def operand_list(self) -> list[jax.Array]:
        """The operands in order, empty arrays of bytes for those that are absent."""
        empty = jnp.zeros(0, jnp.uint8)
        return [self.operands.get(name, empty) for name in self.target.operands]

    def operand_types(self) -> list[Any]:
        """The dtypes and shapes of `operand_list`."""
        absent = jax.ShapeDtypeStruct((0,), jnp.uint8)
        return [self.operands.get(name, absent) for name in self.target.operands]

    def result_types(self) -> list[Any]:
        """The types of the results in order, empty arrays of bytes for those that are unwanted."""
        absent = ((0,), jnp.uint8)
        return [self.type_of(*self.results.get(name, absent)) for name in self.target.results]

    def type_of(self, shape: Sequence[int], dtype: Any) -> Any:
        """The type of a result: varies over a mesh as the query does."""
        return _compat.result_type(jax.typeof(self.operands["query"]), shape, dtype)

    def attributes(self) -> Attributes:
        """The attributes on every platform. Handlers type them strictly: int64 and float64."""
        return {
            "window_left": np.int64(self.config.window_left),
            "window_right": np.int64(self.config.window_right),
            "soft_cap": np.float64(self.config.soft_cap),
            "dropout_threshold": np.int64(self.config.dropout_threshold),
        }


class Platform(abc.ABC):
    """The native kernels of a platform."""

    def __init__(self, module: Module):
        self.module = module

    @property
    def batch_axes(self) -> int:
        """The most batch axes that the kernels take."""
        return self.module.facts["batch_dims"]

    def limitation(self, config: Config, operands: Mapping[str, Any], wanted: Wanted) -> str | None:
        """Why the kernels can't compute a call that is right; None where they can.

        Args:
          config: what is static.
          operands: operands of the forward pass, or their types.
          wanted: what a backward pass shall compute; empty for a forward pass.
        """
        del config, operands, wanted
        return None

    def readable(self, operands: Operands) -> Operands:
        """The operands in dtypes that the kernels read."""
        return operands

    def attributes(self, call: Call) -> Attributes:
        """The attributes of a call."""
        return call.attributes()

    @abc.abstractmethod
    def workspace(self, call: Call) -> list[Any]:
        """The type of the call's workspace, its last result; none where it has no such result."""


class Cpu(Platform):
    """The CPU kernels: every dtype, every argument, deterministic always."""

    # Parallel tasks that the keys of one (batch, key/value head) are dealt to: no more than this,
    # and none with fewer keys than a tile of the kernel has.
    _MAX_CHUNKS = 4
    # How many tasks in all are enough. Not the machine's processors: sums of the same numbers, in
    # the same order, everywhere.
    _ENOUGH_TASKS = 8

    def workspace(self, call: Call) -> list[Any]:
        """A backward call's `[chunks, *b, T, N, H]` for sums of the query's cotangent.

        It is empty where the query's cotangent itself can hold them.
        """
        if call.target is FORWARD:
            return []
        query, results = call.operands["query"], call.results
        chunks, dtype = self._chunks(call), compute_dtype(query.dtype)
        enough = "query" in results and chunks == 1 and query.dtype == dtype
        if enough or ("query" not in results and "scale" not in results):
            return [call.type_of((0,), jnp.uint8)]
        return [call.type_of((chunks, *query.shape), dtype)]

    def _chunks(self, call: Call) -> int:
        """How many tasks share the keys of one, so that there are enough in all."""
        query, key, results = call.operands["query"], call.operands["key"], call.results
        # A task sums over the batch axes that the cotangents of key and value don't have.
        summed = results.get("key") or results.get("value") or (query.shape, None)
        batches = summed[0][: len(batch_shape(query))]
        if not is_static((*batches, key.shape[-3])):
            return 1
        tasks = int(np.prod(batches, dtype=np.int64)) * key.shape[-2]
        enough = -(-self._ENOUGH_TASKS // max(tasks, 1))
        tiles = -(-key.shape[-3] // self.module.facts["tile_keys"])
        return max(1, min(enough, self._MAX_CHUNKS, tiles))


class Cuda(Platform):
    """The CUDA kernels: float32 at most, their workspace sized by the module."""

    # Values of `jax.default_matmul_precision` that a GPU meets with TF32 products of float32; all
    # others ask for more.
    _TF32_PRECISIONS = frozenset(
        [
            *("default", "high", "bfloat16", "tensorfloat32", "TF32_TF32_F32"),
            *("BF16_BF16_F32", "BF16_BF16_BF16", "F16_F16_F32", "F16_F16_F16"),
        ]
    )

    def limitation(self, config: Config, operands: Mapping[str, Any], wanted: Wanted) -> str | None:
        """Float64, and broadcast biases' gradients that must be deterministic."""
        if operands["query"].dtype == np.float64:
            return "its native kernels do not compute in float64"
        full = dict(wanted)
        if config.deterministic_gradients and "bias" in full:
            query, key = operands["query"], operands["key"]
            logits = (*batch_shape(query), query.shape[-2], query.shape[-3], key.shape[-3])
            if cotangent_shape("bias", full["bias"], operands) != logits:
                return (
                    "its native kernels add up the gradient of a broadcast bias in no fixed order, "
                    "and deterministic_gradients=True"
                )
        return None

    def readable(self, operands: Operands) -> Operands:
        """The kernels, which compute in float32, read no float64 bias."""
        bias = operands.get("bias")
        if bias is None or bias.dtype != np.float64:
            return operands
        return operands | {"bias": bias.astype(np.float32)}

    def attributes(self, call: Call) -> Attributes:
        """Also `precision` (0 float32, 1 TF32) and, of a backward call, `deterministic` (0, 1)."""
        tf32 = call.config.precision in self._TF32_PRECISIONS
        attributes = call.attributes() | {"precision": np.int64(tf32)}
        if call.target is BACKWARD:
            attributes["deterministic"] = np.int64(call.config.deterministic_gradients)
        return attributes

    # What bounds workspaces of symbolic sizes: the least and most rows or keys of a tile, padded
    # head dims, and more blocks than problems of few tiles are dealt to.
    _LEAST_TILE, _MOST_TILE, _PADDED_DIMS, _SPLIT_BLOCKS = 16, 128, (64, 128, 256), 384

    def workspace(self, call: Call) -> list[Any]:
        """As many bytes as the module asks for, or at least as many where sizes are symbolic."""
        if not all(is_static(operand.shape) for operand in call.operands.values()):
            return [call.type_of((self._most_kibibytes(call), 1024), jnp.uint8)]
        arguments, options = self._description(call)
        code: Any = self.module.code
        ask = code.forward_workspace if call.target is FORWARD else code.backward_workspace
        return [call.type_of((ask(*arguments, **options),), jnp.uint8)]

    def kernel(self, call: Call, capability: int) -> str:
        """The kernel that computes a call on GPUs of a compute capability, in words."""
        arguments, options = self._description(call)
        code: Any = self.module.code
        ask = code.forward_kernel if call.target is FORWARD else code.backward_kernel
        return ask(*arguments, **options, capability=capability)

    def _description(self, call: Call) -> tuple[list[Any], dict[str, Any]]:
        """Arguments and keyword arguments that tell the module of a call."""
        operands = _dtypes_and_shapes(call.operand_types())
        if call.target is FORWARD:
            return [operands], {**call.attributes()}
        deterministic = call.config.deterministic_gradients
        results = _dtypes_and_shapes(call.result_types())
        return [operands, results], call.attributes() | {"deterministic": deterministic}

    def _most_kibibytes(self, call: Call) -> Any:
        """No fewer than the module would ask for, whatever the sizes are.

        A sum of KiB, not of bytes: an exported program computes it in 32 bits.
        """
        operands, results = call.operands, call.results
        query, key, value = (operands[name].shape for name in ("query", "key", "value"))
        strips = -(-query[-3] // self._LEAST_TILE)  # of rows, the smallest tiles, as of keys
        key_tiles = -(-key[-3] // self._LEAST_TILE)
        batches = math.prod(batch_shape(operands["query"]))
        dim = min(size for size in self._PADDED_DIMS if size >= max(query[-1], value[-1]))
        size = self._SPLIT_BLOCKS * self._MOST_TILE * (2 * dim + 2) // 256  # of sums that are dealt
        if "query" in results or "scale" in results:
            # A strip of 16 rows has dim / 16 KiB of floats, and 8 bytes of counters.
            size += batches * query[-2] * strips * (dim // 16) + batches * query[-2] * strips // 128
        if call.target is not FORWARD:
            size += batches * query[-2] * strips * 3 // 16  # three floats of each row
        if "bias" in results:
            *rest, columns = results["bias"][0]
            size += (
                math.prod(rest) * (-(-columns // 256)) if columns != 1 else math.prod(rest) // 256
            )
        if "query_segment_ids" in operands:
            size += batches * (strips + key_tiles) // 128
        if "mask" in operands:
            # A byte for each tile of the mask itself, which may be broadcast.
            *rest, rows, columns = operands["mask"].shape
            tiles = math.prod(rest) * -(-columns // self._LEAST_TILE)
            size += (tiles // 32 + 1) * (-(-rows // self._LEAST_TILE) // 32 + 1)
        return size + 8  # each array is aligned, and what was divided may have left a rest


def _dtypes_and_shapes(arrays: Sequence[Any]) -> list[tuple[str, tuple[int, ...]]]:
    return [(array.dtype.name, array.shape) for array in arrays]


PLATFORMS: Mapping[str, Platform] = {
    "cpu": Cpu(MODULES["cpu"]),
    "cuda": Cuda(MODULES["cuda"]),
}
