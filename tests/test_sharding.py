"""Arrays dealt to the devices of a mesh: the same numbers, and every device computes its own part.

On eight devices of the CPU, which `conftest` asks for.
"""

import contextlib
import dataclasses
import functools
import math
import re
import socket
import subprocess
import sys
import textwrap

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from calls import (
    QKV,
    Call,
    Shape,
    compare,
    compiled,
    make_call,
    normal,
    python_environment,
    run_python,
)
from jaxflash import flash_attention


def make_mesh(sizes, axis_type=AxisType.Auto):
    """A mesh of CPU devices with axes "data" and "model"."""
    devices = jax.devices("cpu")[: math.prod(sizes)]
    assert len(devices) == math.prod(sizes), "conftest asks for eight devices"
    return jax.make_mesh(sizes, ("data", "model"), (axis_type,) * 2, devices=devices)


def everything(shape):
    """A call with every argument, some of them broadcast."""
    B, T, S, N = shape.B, shape.T, shape.S, shape.N
    return make_call(
        shape,
        bias=lambda rng: normal(rng, (B, N, T, S)),
        mask=lambda rng: rng.random((1, N, T, S)) < 0.9,
        scale=np.full((), 0.4, np.float32),
        sinks=lambda rng: normal(rng, (N,)),
        query_seq_lengths=lambda rng: rng.integers(1, T + 1, B, np.int32),
        key_value_seq_lengths=lambda rng: rng.integers(1, S + 1, B, np.int32),
        query_offset=lambda rng: rng.integers(0, 3, B, np.int32),
        query_segment_ids=lambda rng: rng.integers(0, 2, (B, T), np.int32),
        key_value_segment_ids=lambda rng: rng.integers(0, 2, (B, S), np.int32),
        dropout_key=jax.random.key(3),
        dropout_rate=0.2,
        logits_soft_cap=3.0,
        local_window_size=(5, 2),
    )


# The dimensions of arguments, by the mesh axis that they are dealt to.
SPECS = {
    **dict.fromkeys(QKV, P("data", None, "model")),
    **dict.fromkeys(("bias", "mask"), P("data", "model")),
    "sinks": P("model"),
    **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "query_offset"), P("data")),
    **dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), P("data")),
}


def fitting(spec, shape, mesh):
    """A spec without the axes that don't divide a dimension."""
    dims = zip(shape, (*spec, *[None] * len(shape)), strict=False)
    return P(*(axis if axis and size % mesh.shape[axis] == 0 else None for size, axis in dims))


def placed(call, mesh, specs=SPECS):
    """The call's arrays on the mesh."""
    return {
        name: jax.device_put(
            array, NamedSharding(mesh, fitting(specs.get(name, P()), array.shape, mesh))
        )
        for name, array in call.arrays.items()
    }


def cotangents_on(call, mesh, spec=SPECS["query"]):
    return tuple(
        jax.device_put(c, NamedSharding(mesh, fitting(spec, c.shape, mesh)))
        for c in call.cotangents
    )


def runner(call, implementation):
    names = tuple(n for n in (*QKV, "bias", "sinks", "scale") if n in call.arrays)
    return compiled(implementation, names, tuple(sorted(call.options.items())))


def kernel_sizes(program, target):
    """How many elements the first result of each call of a kernel has."""
    calls = re.findall(rf"= \((\w+)\[([\d,]*)\].*custom_call_target=\"{target}\"", program)
    return [math.prod(map(int, sizes.split(","))) for _, sizes in calls]


@dataclasses.dataclass(frozen=True)
class Layout:
    mesh: tuple[int, int]
    shape: Shape
    parts: int  # that output is dealt in


LAYOUTS = {
    "heads of their own": Layout((4, 2), Shape(B=4, N=4, K=4, T=9, S=11), 8),
    "grouped heads": Layout((2, 4), Shape(B=2, N=8, K=4, T=9, S=11), 8),
    "fewer key heads than devices": Layout((2, 4), Shape(B=2, N=8, K=2, T=9, S=11), 8),
    "one key head": Layout((1, 8), Shape(B=1, N=8, K=1, T=9, S=11), 8),
    "three devices": Layout((3, 1), Shape(B=3, N=2, K=1, T=9, S=11), 3),
    "six devices": Layout((3, 2), Shape(B=3, N=4, K=2, T=9, S=11), 6),
    "heads that don't divide": Layout((2, 4), Shape(B=2, N=6, K=3, T=9, S=11), 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_b99_each_device_computes_its_part(native, name):
    """Every argument, forward and backward: no gathering, local shapes, the query's sharding."""
    layout = LAYOUTS[name]
    mesh, call = make_mesh(layout.mesh), everything(layout.shape)
    run, arrays = runner(call, native), placed(call, mesh)
    got = run(arrays, cotangents_on(call, mesh))
    compare(jax.tree.map(np.asarray, got), call)
    assert got["output"].sharding.is_equivalent_to(arrays["query"].sharding, 4)
    program = run.lower(arrays, cotangents_on(call, mesh)).compile().as_text()
    for target, result in (("jaxflash_forward", "output"), ("jaxflash_backward", "d_query")):
        assert kernel_sizes(program, target) == [got[result].size // layout.parts]
    if layout.parts == math.prod(layout.mesh):
        assert "all-gather" not in program


@pytest.mark.parametrize("name", LAYOUTS)
def test_b107_shardings_change_no_numbers(implementation, name):
    """Over any number of devices, and where key and value are dealt otherwise than the query."""
    layout = LAYOUTS[name]
    mesh, call = make_mesh(layout.mesh), everything(layout.shape)
    for keys in (P("data", None, "model"), P(None, None, "data"), P(), P(None, "data")):
        specs = {**SPECS, "key": keys, "value": keys}
        got = runner(call, implementation)(placed(call, mesh, specs), call.cotangents)
        compare(jax.tree.map(np.asarray, got), call)


BROADCAST = {
    "bias of all": (1, 1, 11),
    "bias of each head": (4, 1, 11),
    "bias of each row": (1, 9, 1),
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", BROADCAST)
def test_b104_broadcast_biases_are_summed_once(implementation, name, batch):
    call = make_call(
        LAYOUTS["heads of their own"].shape,
        bias=lambda rng: normal(rng, (batch, *BROADCAST[name])),
        sinks=lambda rng: normal(rng, (4,)),
    )
    mesh = make_mesh((4, 2))
    got = runner(call, implementation)(placed(call, mesh), cotangents_on(call, mesh))
    compare(jax.tree.map(np.asarray, got), call)


@pytest.mark.parametrize("spec", [P(), P("model"), P(None, "data"), P(None, None, "data")], ids=str)
def test_cotangents_sharded_otherwise(implementation, spec):
    call = make_call(LAYOUTS["heads of their own"].shape)
    mesh = make_mesh((4, 2))
    got = runner(call, implementation)(placed(call, mesh), cotangents_on(call, mesh, spec))
    compare(jax.tree.map(np.asarray, got), call)


def test_b109_a_sharded_sequence_is_gathered(implementation):
    """Never attention of each part of the sequence by itself."""
    call = make_call(Shape(B=1, T=16, S=16, N=2), is_causal=True)
    mesh = make_mesh((4, 2))
    specs = dict.fromkeys(QKV, P(None, "data"))
    got = runner(call, implementation)(placed(call, mesh, specs), call.cotangents)
    compare(jax.tree.map(np.asarray, got), call)


@pytest.mark.parametrize("inside", [False, True])
def test_b106_explicit_meshes(implementation, inside):
    """Shardings in types: that of the output is the query's; calls within `set_mesh` or without."""
    call = everything(LAYOUTS["grouped heads"].shape)
    mesh = make_mesh((2, 4), AxisType.Explicit)
    arrays, cotangents = placed(call, mesh), cotangents_on(call, mesh)
    run = runner(call, implementation)
    if inside:
        with jax.set_mesh(mesh):
            got = run(arrays, cotangents)
    else:
        got = run(arrays, cotangents)
    assert jax.typeof(got["output"]).sharding.spec == P("data", None, "model", None)
    compare(jax.tree.map(np.asarray, got), call)


def test_b101_vmap_in_a_sharded_program(native):
    """The mapped axis becomes a batch axis, which may be dealt too."""
    mesh = make_mesh((4, 2))
    x = normal(np.random.default_rng(0), (3, 4, 9, 4, 8))
    attend = jax.jit(
        jax.vmap(lambda q: flash_attention(q, q, q, is_causal=True, implementation=native))
    )
    for spec in (P(None, "data", None, "model"), P(None, None, None, "data")):
        y = jax.device_put(x, NamedSharding(mesh, spec))
        np.testing.assert_allclose(attend(y), attend(x), rtol=1e-5, atol=1e-6)
        assert "all-gather" not in attend.lower(y).compile().as_text()


@pytest.mark.parametrize(("sizes", "heads"), [((8, 1), 4), ((4, 2), 6), ((2, 4), 6)])
def test_a_part_of_a_mesh_axis(implementation, sizes, heads):
    """Columns of a projection sharded so that heads are over a part of an axis: no spec says it."""
    mesh = make_mesh(sizes)
    rng = np.random.default_rng(1)
    x, w = normal(rng, (4, 9, 32)), normal(rng, (32, 8 * heads))

    @jax.jit
    def attend(x, w):
        q = (x @ w).reshape(4, 9, heads, 8)
        return flash_attention(q, q, q, implementation=implementation)

    axis = max(mesh.shape, key=mesh.shape.get)
    spread = jax.device_put(w, NamedSharding(mesh, P(None, axis)))
    np.testing.assert_allclose(
        attend(jax.device_put(x, NamedSharding(mesh, P())), spread),
        attend(x, w),
        rtol=1e-4,
        atol=1e-5,
    )


def test_b102_shard_map_with_checks(implementation):
    """Replicated bias and sinks inside `shard_map`; their gradients are summed over devices."""
    call = everything(LAYOUTS["grouped heads"].shape)
    call.arrays["bias"] = call.arrays["bias"][:1]
    del call.options["dropout_rate"], call.arrays["dropout_key"]
    mesh = make_mesh((2, 4))
    specs = {name: fitting(SPECS.get(name, P()), x.shape, mesh) for name, x in call.arrays.items()}
    rows = P("data", None, "model")

    def attend(arrays):
        return flash_attention(
            **arrays, **call.options, return_residual=True, implementation=implementation
        )

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=(rows, rows))

    @jax.jit
    def run(arrays, cotangents):
        floats = {n: arrays[n] for n in (*QKV, "bias", "sinks", "scale")}
        (output, lse), pull = jax.vjp(lambda floats: mapped({**arrays, **floats}), floats)
        gradients = pull(cotangents)[0]
        return {"output": output, "lse": lse, **{f"d_{n}": g for n, g in gradients.items()}}

    compare(jax.tree.map(np.asarray, run(call.arrays, call.cotangents)), call)


def test_shard_map_over_one_of_two_axes(implementation):
    """The other axis is the compiler's, outside of `custom_partitioning`: right, if gathered."""
    mesh = make_mesh((4, 2))
    x = normal(np.random.default_rng(0), (4, 9, 4, 8))
    attend = functools.partial(flash_attention, is_causal=True, implementation=implementation)
    mapped = jax.shard_map(
        lambda q: attend(q, q, q),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    y = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
    with jax.set_mesh(mesh):
        got = jax.jit(mapped)(y)
    np.testing.assert_allclose(got, attend(x, x, x), rtol=1e-5, atol=1e-6)


def test_without_shardy(implementation):
    """The compiler's older way of spreading shardings; in a process of its own."""
    script = """
        import sys
        import jax
        import numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from jaxflash import flash_attention

        jax.config.update("jax_use_shardy_partitioner", False)
        mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
        x = np.random.default_rng(0).standard_normal((4, 9, 4, 8), np.float32)
        y = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))

        def loss(q):
            return (flash_attention(q, q, q, implementation=sys.argv[1]) ** 2).sum()

        run = jax.jit(jax.grad(loss))
        jax.config.update("jax_use_shardy_partitioner", True)
        with_shardy = run.lower(y)  # its callbacks are of no use without
        jax.config.update("jax_use_shardy_partitioner", False)
        np.testing.assert_allclose(run(y), run(x), rtol=1e-5, atol=1e-5)
        print("all-gather" in run.lower(y).compile().as_text())
    """
    printed = run_python(script, implementation).strip()
    assert printed in ("False",) if implementation == "native" else ("True", "False")


CACHED = """
    import sys
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from jaxflash import flash_attention

    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", None, "model"))
    x = jax.device_put(np.ones((4, 9, 4, 8), np.float32), sharding)

    def loss(q):
        return flash_attention(q, q, q, is_causal=True, implementation="native").sum()

    program = jax.jit(jax.grad(loss)).lower(x)
    events.clear()
    program.compile()
    print(*sorted(event.rsplit("/")[-1] for event in events if event.endswith(("hits", "misses"))))
"""


def test_b117_a_second_process_finds_the_program_in_the_cache(native, tmp_path):
    del native
    assert run_python(CACHED, str(tmp_path)).strip() == "cache_misses"
    assert run_python(CACHED, str(tmp_path)).strip() == "cache_hits"


TWO_PROCESSES = """
    import sys
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from jaxflash import flash_attention

    implementation, address, process = sys.argv[1:]
    jax.distributed.initialize(address, 2, int(process))
    assert jax.device_count() == 8 and jax.local_device_count() == 4
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    x = np.random.default_rng(0).standard_normal((4, 9, 4, 8), np.float32)

    def loss(q):
        output = flash_attention(q, q, q, is_causal=True, implementation=implementation)
        return (output ** 2).sum()

    sharding = NamedSharding(mesh, P("data", None, "model"))
    y = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    value, gradient = jax.jit(jax.value_and_grad(loss))(y)
    with jax.default_device(jax.local_devices()[0]):
        want, want_gradient = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for shard in gradient.addressable_shards:
        np.testing.assert_allclose(shard.data, want_gradient[shard.index], rtol=1e-5, atol=1e-5)
    print("done")
"""


def test_two_processes_of_four_devices(implementation):
    """Multi-process JAX on one machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=4"
    script = textwrap.dedent(TWO_PROCESSES)
    command = [sys.executable, "-P", "-c", script, implementation, address]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, number],
                    env=python_environment(XLA_FLAGS=flags),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for number in ("0", "1")
        ]
        for process in processes:
            stack.callback(process.kill)
        printed = [process.communicate(timeout=120) for process in processes]
    # Collectives print too.
    assert all(output.endswith("done\n") for output, _ in printed), printed


def test_calls_with_one_name_share_their_callbacks(native):
    """Layers with the same shapes lower to calls of one name; each is partitioned."""
    mesh = make_mesh((4, 2))
    x = normal(np.random.default_rng(0), (4, 9, 4, 8))

    def layers(x):
        for _ in range(3):
            x = flash_attention(x, jnp.sin(x), x, implementation=native)
        return x

    y = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
    first = jax.jit(layers).lower(y)
    second = jax.jit(lambda x: layers(x) + 1).lower(y)
    del first  # whose callbacks the second's calls have found
    np.testing.assert_allclose(second.compile()(y), layers(x) + 1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_are_on_no_mesh(implementation, axis_type):
    """NumPy arrays in the context of a mesh, as in the first step of many programs."""
    call = make_call(Shape(B=2, N=2), is_causal=True)
    with jax.set_mesh(make_mesh((2, 2), axis_type)):
        got = runner(call, implementation)(call.arrays, call.cotangents)
    compare(jax.tree.map(np.asarray, got), call)


def test_a_constraint_alone_deals_a_call(native):
    """The mesh is known from the query's type where no argument has one."""
    mesh = make_mesh((4, 2))
    x = normal(np.random.default_rng(0), (4, 9, 4, 8))

    @jax.jit
    def attend(x):
        q = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None, "model")))
        return flash_attention(q, q, q, implementation=native)

    with jax.set_mesh(mesh):
        program = attend.lower(x).compile().as_text()
        got = attend(x)
    assert kernel_sizes(program, "jaxflash_forward") == [x.size // 8]
    np.testing.assert_allclose(got, flash_attention(x, x, x), rtol=1e-5, atol=1e-6)


def test_two_meshes_in_a_program(implementation):
    x = normal(np.random.default_rng(0), (4, 9, 4, 8))
    meshes = make_mesh((4, 2)), make_mesh((2, 4))
    one, other = (
        jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for mesh in meshes
    )
    attend = jax.jit(functools.partial(flash_attention, implementation=implementation))
    np.testing.assert_allclose(attend(one, other, other), attend(x, x, x), rtol=1e-5, atol=1e-6)


def test_the_caller_s_float64_is_the_compiler_s(native):
    """The compiler asks what a device computes in threads that know no `enable_x64`."""
    mesh = make_mesh((4, 2))
    x = normal(np.random.default_rng(0), (4, 9, 4, 8), np.float64)
    run = jax.jit(jax.grad(lambda q: (flash_attention(q, q, q, implementation=native) ** 2).sum()))
    with jax.enable_x64(True):
        y = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
        program, expected = run.lower(y), run(x)
        got = program.compile()(y)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_export_of_a_sharded_function(implementation):
    """An exported program can hold no callbacks: it gathers, and is right."""
    mesh = make_mesh((4, 2))
    x = normal(np.random.default_rng(0), (4, 9, 4, 8))
    y = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
    run = jax.jit(lambda q: flash_attention(q, q, q, implementation=implementation))
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"jaxflash_{direction}")
        for direction in ("forward", "backward")
    ]
    exported = jax.export.export(run, platforms=["cpu"], disabled_checks=checks)(y)
    np.testing.assert_allclose(exported.call(y), run(x), rtol=1e-5, atol=1e-6)


def test_unsharded_arrays_on_a_mesh(implementation):
    """Replicated operands: every device computes everything."""
    call = Call(make_call(Shape(B=2, N=2)).arrays, {})
    mesh = make_mesh((2, 2))
    got = runner(call, implementation)(placed(call, mesh, {}), call.cotangents)
    compare(jax.tree.map(np.asarray, got), call)
