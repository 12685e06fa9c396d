"""How native kernels run on the devices of a mesh: what of a call each of them computes.

Inside `jit` the compiler deals arrays to devices, and knows nothing of a custom call: it would
gather every operand. Here it learns which dimensions may be dealt (batch and heads: a device then
computes attention of its own part, and needs nothing of the others) and which may not (lengths and
head dims). JAX's `custom_partitioning` asks twice: for a rule by which shardings spread through the
call before they are settled, and, when they are, for the computation of one device.

Batch axes of size 1 in an operand are broadcast, and stay whole on each device. What one device
computes of a cotangent that is summed over an axis that is dealt is its share, and is added up, in
the cotangent's dtype as XLA adds any array of that dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

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
      operands: the letters of each operand's dimensions after the batch, as in `FORWARD_OPERANDS`.
      results: those of each result.
      batch: the sizes of the batch axes.
      sizes: the full sizes of the letters N, K, T and S.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    batch: tuple[int, ...]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], config: Config, wanted: Wanted | None) -> Layout:
        """The layout of a call with operands of `shapes`; `wanted`: of a backward call."""
        operands = [FORWARD_OPERANDS[name] for name in config.operands]
        results = list(FORWARD_RESULTS.values())
        if wanted is not None:
            operands += BACKWARD_OPERANDS.values()
            results = [COTANGENTS[name] for name, _ in wanted]
        *batch, rows, heads, _ = shapes[config.operands.index("query")]
        *_, columns, key_heads, _ = shapes[config.operands.index("key")]
        sizes = {"N": heads, "K": key_heads, "T": rows, "S": columns}
        return cls(tuple(operands), tuple(results), tuple(batch), sizes)

    def dimensions(self, letters: str, shape: Sequence[int]) -> list[str]:
        """What the dimensions of an array stand for; "" where it is broadcast.

        Batch axes are "0", "1", ...; key heads are "N" where every query head has its own.
        """
        batch = [
            str(axis) if size == full else ""
            for axis, (size, full) in enumerate(zip(shape, self.batch, strict=False))
        ]
        one_each = self.sizes["N"] == self.sizes["K"]
        rest = [
            ""
            if size != self.sizes.get(letter, size)
            else "N"
            if one_each and letter == "K"
            else letter
            for letter, size in zip(letters, shape[len(self.batch) :], strict=True)
        ]
        return batch + rest


def _rule(layout: Layout, shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> Any:
    """How shardings spread from operand to operand and result, for Shardy.

    Heads of queries and of keys are factors apart unless they are the same: a factor of both could
    be split over a part of a mesh axis, which is not dealt here.
    """
    broadcast = 0
    whole: dict[str, None] = {}  # factors that are not dealt, in the order in which they come

    def factor(dimension: str) -> str:
        nonlocal broadcast
        if not dimension:
            broadcast += 1
            return f"broadcast{broadcast}"
        if dimension.isdigit():
            return f"batch{dimension}"
        if dimension not in "NK":
            whole[dimension] = None
        return dimension

    def mappings(
        all_letters: Sequence[str], all_shapes: Sequence[Sequence[int]]
    ) -> tuple[ArrayMapping, ...]:
        return tuple(
            ArrayMapping(*(factor(dimension) for dimension in layout.dimensions(letters, shape)))
            for letters, shape in zip(all_letters, all_shapes, strict=True)
        )

    operand_mappings = mappings(layout.operands, shapes)
    result_mappings = mappings(layout.results, results)
    return SdyShardingRule(operand_mappings, result_mappings, need_replication_factors=tuple(whole))


@dataclass(frozen=True)
class Plan:
    """Which mesh axes deal out which dimension ("0", "1", ... of the batch, and "N")."""

    mesh: AbstractMesh
    layout: Layout
    dealt: Mapping[str, MeshAxes]

    @classmethod
    def of(cls, mesh: AbstractMesh, layout: Layout, arrays: Sequence[Any]) -> Plan:
        """Deals each dimension as the first operand that is sharded along it, query first."""
        dealt: dict[str, MeshAxes] = {}
        for letters, array in zip(layout.operands, arrays, strict=True):
            spec = _compat.spec_on_mesh(array.sharding, mesh, len(array.shape))
            dimensions = layout.dimensions(letters, array.shape)
            for dimension, axes in zip(dimensions, spec, strict=True):
                dimension = "N" if dimension == "K" else dimension
                used = {axis for others in dealt.values() for axis in others}
                axes = _fitting(mesh, layout, dimension, axes)
                if axes and dimension not in dealt and not used.intersection(axes):
                    dealt[dimension] = axes
        return cls(mesh, layout, dealt)

    @property
    def head_axes(self) -> MeshAxes:
        """The mesh axes that query heads are dealt to."""
        return self.dealt.get("N", ())

    @property
    def shares_key_heads(self) -> bool:
        """Whether several devices have query heads of one key head: all get all key heads."""
        return self.layout.sizes["K"] % _parts(self.mesh, self.head_axes) != 0

    def sharding(self, letters: str, shape: Sequence[int]) -> NamedSharding:
        """How an array is dealt."""
        spec = []
        for dimension in self.layout.dimensions(letters, shape):
            if dimension == "K":
                dimension = "" if self.shares_key_heads else "N"
            spec.append(self.dealt.get(dimension) or None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def shardings(
        self, all_letters: Sequence[str], arrays: Sequence[Any]
    ) -> tuple[NamedSharding, ...]:
        """How several are."""
        pairs = zip(all_letters, arrays, strict=True)
        return tuple(self.sharding(letters, array.shape) for letters, array in pairs)

    def shares(self, letters: str, shape: Sequence[int]) -> MeshAxes:
        """The mesh axes whose devices compute shares of one result, to be added up."""
        there = self.layout.dimensions(letters, shape)
        if "K" in there and not self.shares_key_heads:
            there.append("N")
        return tuple(
            axis
            for dimension, axes in self.dealt.items()
            if dimension not in there
            for axis in axes
        )

    def key_head(self) -> jax.Array:
        """On a device: which key head its query heads share."""
        heads, key_heads = self.layout.sizes["N"], self.layout.sizes["K"]
        here = heads // _parts(self.mesh, self.head_axes)
        return lax.axis_index(self.head_axes) * here // (heads // key_heads)


def _parts(mesh: AbstractMesh, axes: MeshAxes) -> int:
    """How many parts mesh axes make."""
    return math.prod(mesh.shape[axis] for axis in axes)


def _fitting(mesh: AbstractMesh, layout: Layout, dimension: str, axes: MeshAxes) -> MeshAxes:
    """As many of the mesh axes, from the first on, as may deal a dimension out."""
    if not (dimension.isdigit() or dimension == "N"):
        return ()
    size = layout.batch[int(dimension)] if dimension.isdigit() else layout.sizes["N"]
    while axes:
        parts = _parts(mesh, axes)
        # A device's heads have key heads of their own, or all of them the same one.
        key_heads = layout.sizes["K"] if dimension == "N" else parts
        if size % parts == 0 and (key_heads % parts == 0 or parts % key_heads == 0):
            return axes
        axes = axes[:-1]
    return ()


def _local_call(
    function: Callable[..., Sequence[jax.Array]],
    plan: Plan,
    results: Sequence[Any],
    *operands: jax.Array,
) -> list[jax.Array]:
    """What one device computes: `function` of its parts of the operands."""
    layout = plan.layout
    if not plan.shares_key_heads:
        outputs = function(*operands)
    else:
        key_head = plan.key_head()
        outputs = function(
            *(
                lax.dynamic_slice_in_dim(operand, key_head, 1, -2) if "K" in letters else operand
                for letters, operand in zip(layout.operands, operands, strict=True)
            )
        )
        outputs = [
            _among_heads(output, key_head, layout.sizes["K"]) if "K" in letters else output
            for letters, output in zip(layout.results, outputs, strict=True)
        ]
    shares = (
        plan.shares(letters, result.shape)
        for letters, result in zip(layout.results, results, strict=True)
    )
    return [
        lax.psum(output, axes) if axes else output
        for output, axes in zip(outputs, shares, strict=True)
    ]


def _among_heads(of_one: jax.Array, key_head: jax.Array, key_heads: int) -> jax.Array:
    """One key head's array among zeros of the others, `[..., 1, H]` to `[..., K, H]`."""
    zeros = jnp.zeros((*of_one.shape[:-2], key_heads, of_one.shape[-1]), of_one.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, of_one, key_head, -2)


def partitioned(
    function: Callable[..., Sequence[jax.Array]],
    mesh: AbstractMesh,
    *operands: jax.Array,
    config: Config,
    wanted: Wanted | None = None,
) -> Sequence[jax.Array]:
    """Calls `function`, each device of a mesh with its part of the operands.

    Args:
      function: computes the results of a primitive on operands of any batch size and heads.
      mesh: of the operands; empty where they have none, and each device gets everything.
      operands: those of the primitive.
      config: what is static.
      wanted: what a backward pass shall compute; None for a forward pass.
    """
    params = {"config": config} if wanted is None else {"config": config, "wanted": wanted}
    function = functools.partial(function, **params)
    layout = Layout.of([operand.shape for operand in operands], config, wanted)
    on_one_device = _compat.tracing_on_one_device()

    def result_shardings(
        _: Any, arrays: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Sharding, ...]:
        if mesh.empty:
            return (_compat.replicated(),) * len(results)
        return Plan.of(mesh, layout, arrays).shardings(layout.results, results)

    def partition(_: Any, arrays: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        to = result_shardings(mesh, arrays, results)
        if mesh.empty:
            run, from_ = function, (_compat.replicated(),) * len(arrays)
        else:
            plan = Plan.of(mesh, layout, arrays)
            run = functools.partial(_local_call, function, plan, results)
            from_ = plan.shardings(layout.operands, arrays)

        def traced(*local: jax.Array) -> Sequence[jax.Array]:
            with on_one_device():
                return run(*local)

        return mesh, traced, to, from_

    def rule(_: Any, operand_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        return _rule(layout, [t.shape for t in operand_types], [t.shape for t in result_types])

    call = custom_partitioning(lambda *operands: tuple(function(*operands)))
    # Where Shardy is off, shardings spread by `result_shardings`.
    call.def_partition(partition, result_shardings, decode_shardings=False, sharding_rule=rule)
    return call(*operands)
