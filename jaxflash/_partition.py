"""How native kernels run on the devices of a mesh: what of a call each of them computes.

Inside `jit` the compiler deals arrays to devices, and knows nothing of a custom call: it would
gather every operand. Here it learns which dimensions may be dealt (batch and heads: a device then
computes attention of its own part, and needs nothing of the others) and which may not (lengths and
head dims). JAX's `custom_partitioning` asks twice: for a rule by which shardings spread through the
call before they are settled, and, when they are, for the computation of one device.

Batch axes of size 1 in an operand are broadcast, and stay whole on each device. What one device
computes of a cotangent that is summed over an axis that is dealt is its share, and is added up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflash import _compat
from jaxflash._operands import (
    BACKWARD_OPERANDS,
    COTANGENTS,
    FORWARD_OPERANDS,
    FORWARD_RESULTS,
    Config,
    Wanted,
)

# Axes of a mesh that a dimension is dealt to.
MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """What the dimensions of the operands and results of a primitive stand for.

    Attributes:
      operands: the axes of each operand after the batch axes, as in `FORWARD_OPERANDS`.
      results: those of each result.
      batch: the sizes of the batch axes.
      heads: how many query heads there are.
      key_heads: how many key/value heads there are.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    batch: tuple[int, ...]
    heads: int
    key_heads: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], config: Config, wanted: Wanted | None) -> Layout:
        """The layout of a call with operands of `shapes`; `wanted`: of a backward call."""
        operands = [FORWARD_OPERANDS[name] for name in config.operands]
        results = list(FORWARD_RESULTS.values())
        if wanted is not None:
            operands += BACKWARD_OPERANDS.values()
            results = [COTANGENTS[name] for name, _ in wanted]
        query = shapes[config.operands.index("query")]
        key = shapes[config.operands.index("key")]
        return cls(tuple(operands), tuple(results), tuple(query[:-3]), query[-2], key[-2])

    def dimensions(self, axes: str, shape: Sequence[int]) -> list[str]:
        """What the dimensions of an array stand for; "" where it is broadcast.

        Batch axes are "0", "1", ...; key heads are "N" where every query head has its own.
        """
        batch = [
            str(axis) if size == full else ""
            for axis, (size, full) in enumerate(zip(shape, self.batch, strict=False))
        ]
        one_each = self.heads == self.key_heads
        rest = [
            "" if axis == "N" and size != self.heads else "N" if one_each and axis == "K" else axis
            for axis, size in zip(axes, shape[len(self.batch) :], strict=True)
        ]
        return batch + rest


def _rule(layout: Layout, shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> Any:
    """How shardings spread from operand to operand and result, for Shardy."""
    fresh = 0
    whole: dict[str, None] = {}  # factors that are not dealt, in the order in which they come

    def factor(dimension: str) -> str:
        nonlocal fresh
        if not dimension:
            fresh += 1
            return f"broadcast{fresh}"
        if dimension.isdigit():
            return f"batch{dimension}"
        if dimension not in "NK":
            whole[dimension] = None
        return dimension

    def mappings(all_axes: Sequence[str], all_shapes: Sequence[Sequence[int]]) -> tuple:
        return tuple(
            ArrayMapping(*(factor(dimension) for dimension in layout.dimensions(axes, shape)))
            for axes, shape in zip(all_axes, all_shapes, strict=True)
        )

    operand_mappings = mappings(layout.operands, shapes)
    result_mappings = mappings(layout.results, results)
    return SdyShardingRule(operand_mappings, result_mappings, need_replication_factors=tuple(whole))


@dataclass(frozen=True)
class Plan:
    """Which mesh axes deal out which dimension ("0", "1", ... of the batch, and "N")."""

    mesh: Mesh
    layout: Layout
    axes: dict[str, MeshAxes]

    @classmethod
    def of(cls, mesh: Mesh, layout: Layout, arrays: Sequence[Any]) -> Plan:
        """As the first operand has it that is dealt along a dimension; the query is the first."""
        plan = cls(mesh, layout, {})
        for axes, array in zip(layout.operands, arrays, strict=True):
            spec = _compat.spec_on_mesh(array.sharding, mesh, len(array.shape))
            for dimension, dealt in zip(layout.dimensions(axes, array.shape), spec, strict=True):
                plan.add("N" if dimension == "K" else dimension, dealt)
        return plan

    def add(self, dimension: str, dealt: MeshAxes) -> None:
        """Takes over how a dimension is dealt, if it may be and is not yet."""
        used = {axis for axes in self.axes.values() for axis in axes}
        if not dealt or dimension in self.axes or used.intersection(dealt):
            return
        parts = self.parts(dealt)
        if dimension.isdigit():
            fits = self.layout.batch[int(dimension)] % parts == 0
        else:
            key_heads = self.layout.key_heads
            fits = dimension == "N" and self.layout.heads % parts == 0
            fits = fits and (key_heads % parts == 0 or parts % key_heads == 0)
        if fits:
            self.axes[dimension] = dealt

    def parts(self, axes: MeshAxes) -> int:
        """How many parts mesh axes make."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def heads(self) -> MeshAxes:
        """The mesh axes that query heads are dealt to."""
        return self.axes.get("N", ())

    @property
    def shares_key_heads(self) -> bool:
        """Whether several devices have query heads of one key head: all get all key heads."""
        return self.layout.key_heads % self.parts(self.heads) != 0

    def sharding(self, axes: str, shape: Sequence[int]) -> NamedSharding:
        """How an array is dealt."""
        spec = []
        for dimension in self.layout.dimensions(axes, shape):
            if dimension == "K":
                dimension = "" if self.shares_key_heads else "N"
            spec.append(self.axes.get(dimension) or None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def shardings(
        self, all_axes: Sequence[str], arrays: Sequence[Any]
    ) -> tuple[NamedSharding, ...]:
        """How several are."""
        pairs = zip(all_axes, arrays, strict=True)
        return tuple(self.sharding(axes, array.shape) for axes, array in pairs)

    def shares(self, axes: str, shape: Sequence[int]) -> MeshAxes:
        """The mesh axes whose devices compute shares of one result, to be added up."""
        there = self.layout.dimensions(axes, shape)
        if "K" in there and not self.shares_key_heads:
            there.append("N")
        return tuple(
            axis
            for dimension, dealt in self.axes.items()
            if dimension not in there
            for axis in dealt
        )

    def key_head(self) -> jax.Array:
        """On a device: which key head its query heads share."""
        heads = self.layout.heads // self.parts(self.heads)
        return lax.axis_index(self.heads) * heads // (self.layout.heads // self.layout.key_heads)


def _local_call(function: Callable, plan: Plan, results: Sequence[Any], *operands: jax.Array):
    """What one device computes: `function` of its parts of the operands."""
    layout = plan.layout
    if plan.shares_key_heads:
        operands = tuple(
            lax.dynamic_slice_in_dim(operand, plan.key_head(), 1, -2) if "K" in axes else operand
            for axes, operand in zip(layout.operands, operands, strict=True)
        )
    outputs = []
    for axes, whole, output in zip(layout.results, results, function(*operands), strict=True):
        if plan.shares_key_heads and "K" in axes:
            all_heads = (*output.shape[:-2], layout.key_heads, output.shape[-1])
            output = lax.dynamic_update_slice_in_dim(
                jnp.zeros(all_heads, output.dtype), output, plan.key_head(), -2
            )
        shares = plan.shares(axes, whole.shape)
        outputs.append(lax.psum(output, shares) if shares else output)
    return outputs


def partitioned(
    function: Callable, *operands: jax.Array, config: Config, wanted: Wanted | None = None
) -> Sequence[jax.Array]:
    """Calls `function`, each device of a mesh with its part of the operands.

    Args:
      function: computes the results of a primitive on operands of any batch size and heads.
      operands: those of the primitive.
      config: what is static.
      wanted: what a backward pass shall compute; None for a forward pass.
    """
    params = {"config": config} if wanted is None else {"config": config, "wanted": wanted}
    function = functools.partial(function, **params)
    shapes = [operand.shape for operand in operands]
    layout = Layout.of(shapes, config, wanted)

    def of_one(run: Callable) -> Callable:
        # The compiler may ask within the context of a mesh with explicit axes.
        def traced(*local):
            with _compat.without_mesh():
                return run(*local)

        return traced

    def result_shardings(mesh: Mesh, arrays: Sequence[Any], results: Sequence[Any]) -> tuple:
        if mesh.empty:  # shardings without a mesh: everything is everywhere
            return (_compat.replicated(),) * len(results)
        return Plan.of(mesh, layout, arrays).shardings(layout.results, results)

    def partition(mesh: Mesh, arrays: Sequence[Any], results: Sequence[Any]):
        to = result_shardings(mesh, arrays, results)
        if mesh.empty:
            return mesh, of_one(function), to, (_compat.replicated(),) * len(arrays)
        plan = Plan.of(mesh, layout, arrays)
        run = functools.partial(_local_call, function, plan, results)
        return mesh, of_one(run), to, plan.shardings(layout.operands, arrays)

    def rule(mesh, operand_types, result_types):
        del mesh
        return _rule(layout, [t.shape for t in operand_types], [t.shape for t in result_types])

    call = custom_partitioning(lambda *operands: tuple(function(*operands)))
    # Where Shardy is off, shardings spread by `result_shardings`.
    call.def_partition(partition, result_shardings, decode_shardings=False, sharding_rule=rule)
    return call(*operands)
