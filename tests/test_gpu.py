"""What only GPUs show: command buffers, their memory, and several of them."""

import functools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from calls import QKV, Shape, compare, compiled, make_call, normal, repeat, run_python
from jaxflash import flash_attention

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU here")

# One operation is enough for a command buffer, JAX's default is five; loops belong to them too.
COMMAND_BUFFERS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,WHILE "
    "--xla_gpu_graph_min_graph_size=1 --xla_gpu_autotune_level=0 --xla_dump_hlo_as_text"
)

COMMAND_BUFFER_PROGRAM = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jaxflash import flash_attention

    dtype, options = sys.argv[1], eval(sys.argv[2])

    def step(implementation, q, k, v):
        def loss(q, k, v):
            out = flash_attention(q, k, v, implementation=implementation, **options)
            return (out.astype(jnp.float32) ** 2).sum()
        value, gradients = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
        return value, *(jnp.tanh(x) for x in gradients)

    def loop(implementation, q, k, v):
        def body(state):
            i, x = state
            return i + 1, flash_attention(x, k, v, implementation=implementation, **options) + q
        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, q))[1:]

    def inputs(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        return [jax.random.normal(key, (2, 130, 4, 64), dtype) for key in keys]

    def programs(function):
        def captured(*arrays):
            return function("native", *arrays)
        captured.__name__ = f"captured_{function.__name__}"
        return jax.jit(captured), jax.jit(lambda *arrays: function("xla", *arrays))

    for function in (step, loop):
        captured, expected = programs(function)
        for seed in range(4):  # a buffer is recorded, then updated with other addresses
            for a, b in zip(captured(*inputs(seed)), expected(*inputs(seed)), strict=True):
                a, b = (np.asarray(x, np.float64) for x in (a, b))
                error = np.linalg.norm(a - b) / np.linalg.norm(b)
                assert error < 2e-2, (function.__name__, seed, error)
"""


def captured_calls(folder, program):
    """How many custom calls of a program belong to its command buffers, by XLA's dump of it.

    There each operation has a line `number: kind ..`, indented where it is part of another.
    """
    (dump,) = folder.glob(f"*jit_{program}.*thunk_sequence_after_thunk_passes.txt")
    count, inside = 0, False
    for line in dump.read_text().splitlines():
        if line[:1].isdigit():
            inside = "kCommandBuffer" in line
        count += inside and "kCustomCall" in line
    return count


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"logits_soft_cap": 2.0}], ids=str)
def test_b139_command_buffers(native, tmp_path, dtype, options):
    """Captured in a graph, calls follow their data; within a `while_loop` too."""
    del native
    environment = {
        "JAX_PLATFORMS": "cuda",
        "XLA_FLAGS": f"{COMMAND_BUFFERS} --xla_dump_to={tmp_path}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    run_python(COMMAND_BUFFER_PROGRAM, dtype, repr(options), environment=environment)
    assert captured_calls(tmp_path, "captured_step") == 2  # forward and backward
    assert captured_calls(tmp_path, "captured_loop") == 1


def bytes_in_use():
    return jax.devices()[0].memory_stats()["bytes_in_use"]


def test_gpu_memory_is_flat_over_many_calls(native):
    shape = Shape(B=1, T=200, S=200, N=2, H=64)
    arrays = [jnp.asarray(x) for x in make_call(shape, jnp.dtype(jnp.bfloat16)).arrays.values()]
    run = jax.jit(jax.grad(lambda *a: flash_attention(*a, implementation=native).sum(), (0, 1, 2)))
    repeat(run, arrays, 10)
    before = bytes_in_use()
    repeat(run, arrays, 10_000)
    assert bytes_in_use() <= before


needs_two_gpus = pytest.mark.skipif(
    jax.default_backend() != "gpu" or len(jax.devices()) < 2, reason="needs two GPUs"
)


@needs_two_gpus
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["batch", "heads"])
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("features", [False, True])
def test_b137_two_gpus_compute_their_parts(native, sizes, H, features):
    """Batch or heads dealt to two GPUs: the kernels see half, and nothing is gathered."""
    mesh = jax.make_mesh(sizes, ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:2])
    shape = Shape(B=2, T=300, S=333, N=4, K=2, H=H)
    arguments = {"is_causal": True}
    specs = dict.fromkeys(QKV, P("data", None, "model"))
    if features:
        arguments |= {
            "bias": lambda rng: normal(rng, (2, 4, 300, 333), jnp.bfloat16),
            "sinks": lambda rng: normal(rng, (4,)),
            "dropout_rate": 0.1,
            "dropout_key": jax.random.key(5),
        }
        specs |= {"bias": P("data", "model"), "sinks": P("model")}
    call = make_call(shape, jnp.dtype(jnp.bfloat16), **arguments)
    arrays = {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
        for name, x in call.arrays.items()
    }
    names = tuple(n for n in (*QKV, "bias", "sinks") if n in call.arrays)
    run = compiled(native, names, tuple(sorted(call.options.items())))
    got = run(arrays, call.cotangents)
    compare(jax.tree.map(np.asarray, got), call)
    program = run.lower(arrays, call.cotangents).compile().as_text()
    assert "all-gather" not in program
    local = math.prod(got["output"].sharding.shard_shape(got["output"].shape))
    assert 2 * local == got["output"].size


@needs_two_gpus
def test_two_threads_on_two_gpus(native):
    """Each device has its own kernels' attributes and command buffers."""
    call = make_call(Shape(T=300, S=333, N=4, H=64), jnp.dtype(jnp.bfloat16))
    expected = call.check(native, gradients=False)["output"].astype(np.float32)
    failures = []

    def work(device):
        try:
            with jax.default_device(device):
                run = jax.jit(functools.partial(flash_attention, implementation=native))
                arrays = [jax.device_put(x, device) for x in call.arrays.values()]
                for _ in range(50):
                    np.testing.assert_array_equal(np.asarray(run(*arrays), np.float32), expected)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(d,)) for d in jax.devices()[:2] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
