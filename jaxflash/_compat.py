"""The few things that reach below JAX's documented interface, in one place.

Everything here must be tried on every supported JAX version.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax import lax
from jax._src import custom_partitioning, sharding_impls
from jax.interpreters import ad
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding


def varying_axes(*arrays: Any) -> frozenset[Any]:
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


def is_manual(context: Any) -> bool:
    """Whether a program is lowered inside `shard_map`, over all axes of the mesh or some."""
    axes = context.module_context.axis_context
    return isinstance(axes, sharding_impls.SPMDAxisContext) and bool(axes.manual_axes)


def is_export(context: Any) -> bool:
    """Whether a program is lowered to be exported: it can hold no callbacks."""
    return context.module_context.lowering_parameters.for_export


def mesh_of(context: Any) -> AbstractMesh:
    """The mesh of an operation that is being lowered; empty where there is none.

    From the types of its operands, which have it even where the program as a whole has several, or
    none that it could name.
    """
    meshes = [aval.sharding.mesh for aval in context.avals_in]
    axes = context.module_context.axis_context
    meshes += [axes.abstract_mesh] if getattr(axes, "abstract_mesh", None) is not None else []
    for mesh in meshes:
        if not mesh.empty and mesh.size == axes.num_devices:
            return AbstractMesh(mesh.axis_sizes, mesh.axis_names)
    return AbstractMesh((), ())


def with_device_numbers(context: Any) -> Any:
    """A context of lowering whose devices are numbers.

    `custom_partitioning` asks for the program's devices, and has only their number to learn. To
    tell JAX that a primitive needs devices would allow programs with one mesh only.
    """
    module = context.module_context
    axes = module.axis_context
    if not isinstance(axes, sharding_impls.ShardingContext):
        return context
    numbers = tuple(range(axes.num_devices))
    axes = sharding_impls.ShardingContext(axes.num_devices, numbers, None)
    return context.replace(module_context=module.replace(axis_context=axes))


_NAMING = threading.Lock()

# What callbacks depend on beside their call.
_FLAGS = ("jax_enable_x64", "jax_use_shardy_partitioner")


def name_partitioning(context: Any, value: Any, name: str) -> None:
    """Gives the `custom_partitioning` that computes `value` the key `name`.

    JAX's own key is an address, different in every process, so that none finds in the persistent
    compilation cache what another has put there. `name` has to say all that the call depends on:
    calls of the same name share one set of callbacks. On one device there is no such operation.
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
    flags = {flag: jax.config._read(flag) for flag in _FLAGS}
    name = f"{name} {flags} {context.module_context.platforms}"
    with _NAMING:  # entries vanish with the last program that has them
        callback = callbacks.setdefault(name.encode(), callbacks[old.value.encode()])
        context.module_context.add_keepalive(callback)
    attributes["backend_config"] = type(old).get(name, old.context)


def spec_on_mesh(sharding: Sharding | None, mesh: AbstractMesh, rank: int) -> list[tuple[str, ...]]:
    """The axes of `mesh` that each dimension is sharded over.

    No axes at all for a sharding that is not known yet, or that the mesh's axes don't make, such as
    one over a part of an axis.
    """
    if sharding is None:
        return [()] * rank
    hlo_sharding = sharding._to_xla_hlo_sharding(rank)
    parse = sharding_impls.parse_flatten_op_sharding
    try:
        spec = parse(hlo_sharding, mesh)[0]
    except Exception:  # of many kinds, by what it stumbles over
        return [()] * rank
    axes = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    return axes + [()] * (rank - len(axes))


def tracing_on_one_device() -> Callable[[], AbstractContextManager[None]]:
    """Of what a device computes, as of now: x64 mode as it is here, and no mesh in sight.

    The compiler asks for it later, from any thread, whose settings are other ones.
    """
    x64 = bool(jax.config._read("jax_enable_x64"))

    @contextmanager
    def context():
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.enable_x64(x64):
            yield

    return context


def replicated() -> Sharding:
    """Everything on each device, for a program without a mesh."""
    return sharding_impls.GSPMDSharding.get_replicated(jax.devices())
