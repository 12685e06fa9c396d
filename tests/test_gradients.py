"""Every gradient against the reference: sizes, dtypes, argument by argument, subsets."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tolerance
from calls import QKV, Shape, bfloat16, compiled, make_call, normal
from jaxflash import flash_attention


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 130), (63, 65), (130, 7), (65, 257)])
def test_lengths(implementation, T, S):
    make_call(Shape(T=T, S=S, H=40)).check(implementation)


@pytest.mark.parametrize(("H", "Hv"), [(1, 3), (72, 40), (64, 128), (256, 200)])
def test_head_dims(implementation, H, Hv):
    make_call(Shape(T=9, S=70, H=H, Hv=Hv)).check(implementation)


@pytest.mark.parametrize(("N", "K"), [(4, 2), (6, 1), (12, 3)])
def test_head_ratios(implementation, N, K):
    """Key and value gradients are sums over the query heads of their group."""
    make_call(Shape(T=67, S=21, N=N, K=K, H=8)).check(implementation)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16()], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_dtypes(implementation, dtype, is_causal):
    make_call(Shape(T=130, S=257, H=64), dtype, is_causal=is_causal).check(implementation)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_split_over_parallel_tasks(implementation, dtype, is_causal):
    """One kv head and many keys: query gradients are added up from several tasks."""
    make_call(Shape(B=1, T=70, S=600, N=2, K=1, H=16), dtype, is_causal=is_causal).check(
        implementation
    )


BIAS_SHAPES = [s for s in itertools.product((1, 2), (1, 4), (1, 9), (1, 21))]


@pytest.mark.parametrize("bias_shape", BIAS_SHAPES, ids=str)
def test_bias_of_every_broadcast_shape(implementation, bias_shape):
    """The gradient has the bias's own shape: what was broadcast is summed."""
    call = make_call(Shape(T=9, S=21, N=4, K=2), bias=lambda rng: normal(rng, bias_shape))
    call.check(implementation)


@pytest.mark.parametrize("bias_dtype", [np.float32, np.float16, bfloat16()], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
def test_bias_dtypes(implementation, dtype, bias_dtype):
    """Any float dtype, whatever the query's; the gradient has the bias's."""
    call = make_call(
        Shape(T=70, S=130), dtype, bias=lambda rng: normal(rng, (1, 2, 70, 130), bias_dtype)
    )
    call.check(implementation)


def test_bias_larger_than_a_tile(implementation):
    call = make_call(Shape(T=130, S=257, N=2, K=1), bias=lambda rng: normal(rng, (1, 2, 130, 257)))
    call.check(implementation)


@pytest.mark.parametrize("sinks_dtype", [np.float32, bfloat16()], ids=str)
@pytest.mark.parametrize("N", [1, 4])
def test_sinks(implementation, N, sinks_dtype):
    call = make_call(Shape(T=9, S=21, N=N, K=1), sinks=lambda rng: normal(rng, N, sinks_dtype))
    call.check(implementation)


@pytest.mark.parametrize("scale_dtype", [np.float32, bfloat16()], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_traced_scale(implementation, scale_dtype, soft_cap):
    call = make_call(
        Shape(T=70, S=130), scale=np.asarray(0.37, scale_dtype), logits_soft_cap=soft_cap
    )
    call.check(implementation)


@pytest.mark.parametrize("soft_cap", [0.5, 3.0, 50.0])
def test_soft_cap(implementation, soft_cap):
    make_call(Shape(T=70, S=130), scale=1.0, logits_soft_cap=soft_cap).check(implementation)


def test_everything_at_once(implementation):
    call = make_call(
        Shape(B=2, T=70, S=140, N=4, K=2, H=24, Hv=40),
        bias=lambda rng: normal(rng, (2, 1, 70, 140)),
        mask=lambda rng: rng.random((1, 4, 70, 140)) < 0.8,
        scale=np.asarray(0.5, np.float32),
        is_causal=True,
        query_seq_lengths=np.array([70, 66], np.int32),
        key_value_seq_lengths=np.array([131, 140], np.int32),
        local_window_size=(60, None),
        query_offset=np.array([40, 70], np.int32),
        query_segment_ids=np.stack([np.arange(70) // 40, np.arange(70) // 68]),
        key_value_segment_ids=np.stack([np.arange(140) // 90, np.arange(140) // 130]),
        logits_soft_cap=4.0,
        sinks=lambda rng: normal(rng, 4),
        dropout_rate=0.2,
        dropout_key=jax.random.key(7),
    )
    call.check(implementation)


SUBSETS = [
    ("query",),
    ("key",),
    ("value",),
    ("bias",),
    ("sinks",),
    ("scale",),
    ("key", "value"),
    ("query", "bias"),
]


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
def test_only_some_gradients_wanted(implementation, names):
    """Each subset gives what the full set gives, and nothing else comes back."""
    call = make_call(
        Shape(T=70, S=130),
        bias=lambda rng: normal(rng, (1, 2, 70, 1)),
        sinks=lambda rng: normal(rng, 2),
        scale=np.asarray(0.4, np.float32),
    )
    everything = call.check(implementation)
    some = compiled(implementation, names, ())(call.arrays, call.cotangents)
    assert set(some) == {"output", "lse", *("d_" + n for n in names)}
    for name, got in some.items():
        expected = everything[name]
        noise = 4 * tolerance.wobble(np.abs(expected).max(), np.float32)
        np.testing.assert_allclose(got, expected, rtol=0, atol=noise, err_msg=name)


@pytest.mark.parametrize("used", ["output", "lse", "both"])
def test_results_left_unused(implementation, used):
    """A cotangent that is absent is one of zeros: output only, log-sum-exp only."""
    call = make_call(Shape(T=9, S=21))
    d_output, d_lse = call.cotangents
    call.cotangents = (d_output * (used != "lse"), d_lse * (used != "output"))
    expected = call.check(implementation)

    def loss(arrays):
        output, lse = flash_attention(**arrays, return_residual=True, implementation=implementation)
        out_term, lse_term = jnp.vdot(output, d_output), jnp.vdot(lse, d_lse)
        return {"output": out_term, "lse": lse_term, "both": out_term + lse_term}[used]

    gradients = jax.jit(jax.grad(loss))(call.arrays)
    for name in QKV:
        noise = 4 * tolerance.wobble(np.abs(expected["d_" + name]).max(), np.float32)
        np.testing.assert_allclose(gradients[name], expected["d_" + name], rtol=0, atol=noise)


def test_zero_cotangent_gives_exact_zeros(implementation):
    call = make_call(
        Shape(T=9, S=21),
        bias=lambda rng: normal(rng, (2, 2, 9, 21)),
        sinks=lambda rng: normal(rng, 2),
    )
    call.cotangents = tuple(np.zeros_like(c) for c in call.cotangents)
    for name, got in call.flash(implementation).items():
        assert name in ("output", "lse") or not got.any(), name


@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
def test_deterministic_gradients(implementation, dtype):
    """Bitwise equal from run to run, and the same numbers as without the promise."""
    shape = Shape(B=1, T=130, S=600, N=2, K=1, H=16)
    call = make_call(shape, dtype, deterministic_gradients=True)
    first = call.check(implementation)
    for _ in range(5):
        for name, again in call.flash(implementation).items():
            np.testing.assert_array_equal(again, first[name], err_msg=name)
