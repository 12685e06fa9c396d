"""The few things that reach below JAX's documented interface, in one place.

Everything here must be tried on every supported JAX version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec


def varying_axes(*arrays: Any) -> frozenset:
    """The manual mesh axes of `shard_map` along which any of `arrays` varies.

    The attribute of the type has no documented name; this one is there from 0.10 on.
    """
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def vary_alike(arrays: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """Makes `arrays` vary along the same manual mesh axes, those of `like` included.

    The transpose of the cast is a sum over the added axes, which is what gives replicated operands
    inside `shard_map` their whole gradient.
    """
    axes = varying_axes(*arrays, *like)
    if not axes:
        return list(arrays)
    # Sorted: axis names come from a set, and the traced program must not depend on its order.
    return [
        lax.pcast(array, tuple(sorted(axes - varying_axes(array), key=str)), to="varying")
        for array in arrays
    ]


def result_type(like: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The type of a result that varies over a mesh as an operand of type `like` does."""
    unsharded = PartitionSpec(*[None] * len(shape))
    return like.update(
        shape=tuple(shape),
        dtype=dtype,
        weak_type=False,
        sharding=like.sharding.update(spec=unsharded),
    )


def with_automatic_axes(
    function: Callable[..., Any], operands: Sequence[Any], specs: Sequence[PartitionSpec]
) -> Any:
    """Calls `function(*operands)`, inside which explicit mesh axes are automatic.

    On a mesh with explicit axes shardings are part of types. Inside, the compiler shards.

    Args:
      function: returns a tuple of arrays.
      operands: its operands.
      specs: how the results are sharded over the explicit axes outside.
    """
    meshes = [jax.typeof(operand).sharding.mesh for operand in operands]
    mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
    if not mesh.explicit_axes:
        return function(*operands)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    automatic = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)
    return automatic(*operands)


def zero_tangent(primal: Any) -> ad.Zero:
    """The symbolic zero that is the tangent of `primal`."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def zero_cotangent(aval: Any) -> ad.Zero:
    """The symbolic zero that is the cotangent of a tangent of type `aval`."""
    return ad.Zero(aval.to_ct_aval())
