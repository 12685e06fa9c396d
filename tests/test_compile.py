"""What is traced, compiled, exported, and how much memory a compiled call takes."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from calls import Shape, make_call, normal
from jaxflash import flash_attention

TARGETS = ("jaxflash_forward", "jaxflash_backward")
MEGABYTE = 2**20


def loss(implementation, options, arrays):
    output, lse = flash_attention(
        **arrays, **options, return_residual=True, implementation=implementation
    )
    return (output.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()


def values(seed):
    """Everything that may change without a new compilation, as arrays."""
    rng = np.random.default_rng(seed)
    return {
        "mask": rng.random((2, 1, 9, 21)) < 0.5,
        "bias": normal(rng, (1, 2, 1, 21)),
        "query_seq_lengths": rng.integers(0, 10, 2),
        "key_value_seq_lengths": rng.integers(0, 22, 2),
        "query_offset": rng.integers(-5, 20, 2),
        "query_segment_ids": rng.integers(0, 3, (2, 9)),
        "key_value_segment_ids": rng.integers(0, 3, (2, 21)),
        "sinks": normal(rng, 2),
        "scale": np.asarray(rng.random(), np.float32),
        "dropout_key": jax.random.key(seed),
    }


def test_b119_new_values_do_not_recompile(implementation):
    """One trace for other lengths, ids, masks, offsets, scales and dropout keys."""
    traces = []

    @jax.jit
    def run(arrays):
        traces.append(None)
        return jax.grad(
            lambda q: loss(
                implementation, {"is_causal": True, "dropout_rate": 0.1}, {**arrays, "query": q}
            )
        )(arrays["query"])

    results = [run(make_call(Shape(T=9, S=21), **values(seed)).arrays) for seed in range(5)]
    assert len(traces) == 1
    assert run._cache_size() == 1
    assert len({np.asarray(r).tobytes() for r in results}) == 5


def test_eager_calls_with_new_values_do_not_recompile(implementation):
    """Outside jit as well: primitives are compiled once for their shapes."""

    def run(seed):
        arrays = jax.tree.map(jnp.asarray, make_call(Shape(T=9, S=21), **values(seed)).arrays)
        flash_attention(**arrays, is_causal=True, dropout_rate=0.1, implementation=implementation)

    run(0)
    with count_compilations() as count:
        run(1)
    assert count() == 0


class count_compilations:
    """Counts XLA compilations inside the `with` block."""

    def __enter__(self):
        self.names = []
        self.active = True
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return lambda: len(self.names)

    def _hear(self, name, duration, **_):
        if self.active and "backend_compile" in name:
            self.names.append(name)

    def __exit__(self, *_):
        self.active = False


def test_the_compilation_counter_counts():
    with count_compilations() as count:
        jax.jit(lambda x: x * 3.25 + 1.5)(jnp.arange(3.0)).block_until_ready()
    assert count() >= 1


def export(run, *arguments, platforms=None):
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    return jax.export.export(run, platforms=platforms, disabled_checks=checks)(*arguments)


def export_inputs():
    arguments = {n: values(0)[n] for n in ("mask", "bias", "query_offset")}
    return jax.tree.map(jnp.asarray, make_call(Shape(T=9, S=21), **arguments).arrays)


def test_b116_export_round_trip(implementation):
    """Serialised with its gradient, read back, called."""
    arrays = export_inputs()
    run = jax.jit(lambda a: loss(implementation, {"is_causal": True}, a))
    exported = export(run, arrays)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    np.testing.assert_allclose(again.call(arrays), run(arrays), rtol=1e-6)
    differentiable = ("query", "key", "value", "bias")

    def gradient(call):
        def of(floats):
            return call({**arrays, **floats})

        return jax.grad(of)({n: arrays[n] for n in differentiable})

    for got, want in zip(*map(jax.tree.leaves, (gradient(again.call), gradient(run))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert ("jaxflash_forward" in exported.mlir_module()) == (implementation == "native")


def squares(implementation):
    """A gradient, and the types of its arguments with sizes `b`, `t` and `s`."""

    def loss(query, key, lengths):
        output = flash_attention(
            query, key, key, is_causal=True, key_value_seq_lengths=lengths,
            implementation=implementation,
        )  # fmt: skip
        return (output**2).sum()

    def types(b, t, s):
        arrays = (((b, t, 4, 8), "float32"), ((b, s, 2, 8), "float32"), ((b,), "int32"))
        return [jax.ShapeDtypeStruct(*array) for array in arrays]

    return jax.jit(jax.value_and_grad(loss, (0, 1))), types


SYMBOLIC = {"batch": ("b", 9, 11), "batch and lengths": ("b", "t", "s")}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_export_with_symbolic_sizes(implementation, name):
    """One program for every batch size and, by the kernels, every length."""
    names = SYMBOLIC[name]
    symbols = iter(jax.export.symbolic_shape(", ".join(n for n in names if isinstance(n, str))))
    sizes = [next(symbols) if isinstance(n, str) else n for n in names]
    run, types = squares(implementation)
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    export_it = functools.partial(export, run, *types(*sizes), platforms=[platform])
    if implementation == "xla" and name != "batch":
        with pytest.raises(NotImplementedError, match="lengths that are known, got"):
            export_it()
        return
    exported = export_it()
    for batch, t, s in ((3, 9, 11), (1, 9, 11), (2, 17, 5) if name != "batch" else (2, 9, 11)):
        rng = np.random.default_rng(batch)
        query, key, lengths = (np.zeros(x.shape, x.dtype) for x in types(batch, t, s))
        query += rng.standard_normal(query.shape, np.float32)
        key += rng.standard_normal(key.shape, np.float32)
        lengths += rng.integers(1, s + 1, batch, np.int32)
        got, want = exported.call(query, key, lengths), run(query, key, lengths)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:jaxflash.*:RuntimeWarning")
def test_default_implementation_exports_for_several_platforms():
    """`implementation=None` lowers for each platform, gradient included; needs no GPU."""
    arrays = export_inputs()
    run = jax.jit(jax.grad(lambda a: loss(None, {}, a), allow_int=True))
    exported = export(run, arrays, platforms=["cpu", "cuda", "tpu"])
    assert exported.platforms == ("cpu", "cuda", "tpu")
    got, want = exported.call(arrays), run(arrays)
    for name in ("query", "key", "value", "bias"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6, atol=1e-6)


T = 16384
LONG = (1, T, 4, 64)
LONG_ARGUMENTS = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "lengths": (
        {"query_seq_lengths": ((1,), "int32"), "key_value_seq_lengths": ((1,), "int32")},
        {},
    ),
    "window": ({}, {"local_window_size": (1000, 100)}),
    "segments": (
        {"query_segment_ids": ((1, T), "int32"), "key_value_segment_ids": ((1, T), "int32")},
        {},
    ),
    "key bias": ({"bias": ((1, 1, 1, T), "float32")}, {}),
    "key mask": ({"mask": ((1, 1, 1, T), "bool")}, {}),
    "sinks, soft cap, scale": (
        {"sinks": ((4,), "float32"), "scale": ((), "float32")},
        {"logits_soft_cap": 20.0},
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LONG_ARGUMENTS)
def test_memory_at_16384_tokens(native, name, dtype):
    """Temporary memory is O(B*N*T): compiled, not run (dense logits would take 4 GiB)."""
    arrays, options = LONG_ARGUMENTS[name]
    arrays = {n: (LONG, dtype) for n in ("query", "key", "value")} | arrays
    shapes = {n: jax.ShapeDtypeStruct(*x) for n, x in arrays.items()}
    attend = functools.partial(flash_attention, **options, implementation=native)
    floats = [n for n, x in shapes.items() if jnp.issubdtype(x.dtype, jnp.floating)]

    def gradients(arrays, cotangent):
        differentiable = {n: arrays[n] for n in floats}
        _, pull = jax.vjp(lambda d: attend(**{**arrays, **d}), differentiable)
        return pull(cotangent)[0]

    forward = jax.jit(lambda a: attend(**a)).lower(shapes).compile()
    both = jax.jit(gradients).lower(shapes, shapes["query"]).compile()
    assert forward.memory_analysis().temp_size_in_bytes < 32 * MEGABYTE
    assert both.memory_analysis().temp_size_in_bytes < 96 * MEGABYTE


@pytest.mark.parametrize("with_gradients", [False, True])
def test_memory_is_linear_in_the_length(implementation, with_gradients):
    """Twice the length takes at most 2.2 times the temporary memory (a dense formula: 4 times)."""

    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 64), "float32")
        run = functools.partial(loss, implementation, {"is_causal": True})
        run = jax.grad(run) if with_gradients else run
        compiled = jax.jit(run).lower({"query": x, "key": x, "value": x}).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16384) < 2.2 * temporary(8192) + MEGABYTE


def test_vmap_copies_no_keys(native):
    """64 mapped queries over one key and value: no copy of them in temporary memory."""
    q = jax.ShapeDtypeStruct((64, 1, 8, 64), "float32")
    kv = jax.ShapeDtypeStruct((4096, 8, 64), "float32")
    attend = functools.partial(flash_attention, implementation=native)
    compiled = jax.jit(jax.vmap(attend, (0, None, None))).lower(q, kv, kv).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * MEGABYTE
