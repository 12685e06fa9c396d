"""The few things that reach below JAX's documented interface, in one place.

Everything here must be tried on every supported JAX version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax._src import custom_partitioning, dispatch, sharding_impls
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


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


def lowers_to_custom_partitioning(primitive: Primitive) -> None:
    """Has programs with `primitive` lowered for the devices that they will run on."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_manual(context: Any) -> bool:
    """Whether a program is lowered inside `shard_map`, where shardings are the user's own."""
    axes = context.module_context.axis_context
    return isinstance(axes, sharding_impls.SPMDAxisContext) and bool(axes.manual_axes)


def name_partitioning(context: Any, value: Any, name: str) -> None:
    """Gives the `custom_partitioning` that computes `value` the key `name`, if it is one.

    JAX's own key is an address, different in every process, so that none finds in the persistent
    compilation cache what another has put there. `name` has to say all that the call depends on
    beside the devices: calls of the same name on the same mesh share one set of callbacks.
    """
    operation = getattr(value, "owner", None)
    if operation is None or operation.name != "stablehlo.custom_call":
        return
    attributes = operation.attributes
    if custom_partitioning._CUSTOM_PARTITIONING_CALL_NAME not in str(
        attributes["call_target_name"]
    ):
        return
    callbacks = custom_partitioning._sharding_callbacks
    old = attributes["backend_config"]
    callback = callbacks[old.value.encode()]
    devices = [device.id for device in callback.mesh.devices.flat]
    name = f"{name} {callback.mesh} {devices} {context.module_context.platforms}"
    callback = callbacks.setdefault(name.encode(), callback)
    context.module_context.add_keepalive(callback)
    attributes["backend_config"] = type(old).get(name, old.context)


def spec_on_mesh(sharding: Sharding | None, mesh: Mesh, rank: int) -> list[tuple[str, ...]]:
    """The axes of `mesh` that each dimension is sharded over.

    None for a sharding that its axes don't make, such as one over a part of an axis, or that is not
    known yet.
    """
    if sharding is None:
        return [()] * rank
    try:
        hlo_sharding = sharding._to_xla_hlo_sharding(rank)
        spec = sharding_impls.parse_flatten_op_sharding(hlo_sharding, mesh)[0]
    except (ValueError, NotImplementedError, StopIteration):
        return [()] * rank
    axes = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    return axes + [()] * (rank - len(axes))


def without_mesh() -> Any:
    """A context in which no mesh is set: types of arrays are those of one device."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def replicated() -> Sharding:
    """Everything on each device, for a program without a mesh."""
    return sharding_impls.GSPMDSharding.get_replicated(jax.devices())
