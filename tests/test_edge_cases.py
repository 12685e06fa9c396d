"""Empty rows, NaN past lengths, zero sizes, extreme logits and scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calls import QKV, Call, Shape, assert_same, bfloat16, make_call, normal
from jaxflash import flash_attention

EMPTY_ROWS = {
    "first": slice(0, 14),
    "inside": slice(30, 44),
    "across tiles": slice(60, 70),
    "last": slice(126, 130),
    "all": slice(0, 130),
}


@pytest.mark.parametrize("rows", EMPTY_ROWS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_empty_rows(implementation, rows, with_sinks):
    """Output 0, log-sum-exp -inf (the sink, if there is one), and no part in any gradient."""
    mask = np.ones((1, 1, 130, 140), bool)
    mask[:, :, EMPTY_ROWS[rows]] = False
    sinks = {"sinks": lambda rng: normal(rng, 2)} if with_sinks else {}
    call = make_call(Shape(B=1, T=130, S=140), mask=mask, **sinks)
    got = call.check(implementation)
    lse = got["lse"][:, EMPTY_ROWS[rows]]
    expected = call.arrays["sinks"] if with_sinks else -np.inf
    np.testing.assert_array_equal(lse, np.broadcast_to(expected, lse.shape))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_empty_rows_do_not_hear_their_cotangents(implementation, with_sinks):
    """NaN and Inf cotangents of rows that do not exist change nothing, anywhere."""
    sinks = {"sinks": lambda rng: normal(rng, 2)} if with_sinks else {}
    call = make_call(
        Shape(B=2, T=9, S=21),
        query_seq_lengths=np.array([5, 0]),
        scale=np.asarray(0.3, np.float32),
        bias=lambda rng: normal(rng, (1, 1, 1, 21)),
        **sinks,
    )
    expected = call.flash(implementation)
    for number, bad in enumerate((np.nan, np.inf, -np.inf)):
        d_output, d_lse = (c.copy() for c in call.cotangents)
        for b, length in enumerate((5, 0)):
            d_output[b, length:] = bad
            d_lse[b, length + number % 2 :] = bad
        other = Call(call.arrays, {}, call.seed)
        other.cotangents = (d_output, d_lse)
        for name, value in other.flash(implementation).items():
            assert_same(value, expected[name], name)


def test_nan_cotangents_of_rows_that_see_no_key(implementation):
    call = make_call(Shape(B=1, T=9, S=5), is_causal=True, query_offset=np.array(-4))
    expected = call.check(implementation)
    d_output, d_lse = (c.copy() for c in call.cotangents)
    d_output[:, :4], d_lse[:, :4] = np.nan, np.nan
    call.cotangents = (d_output, d_lse)
    for name, value in call.flash(implementation).items():
        assert_same(value, expected[name], name)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
def test_nothing_past_the_lengths_reaches_a_result(implementation, bad, dtype):
    """NaN and Inf in query, key, value and bias past the lengths: bitwise the same results."""
    call = make_call(
        Shape(B=2, T=70, S=140, N=2, K=1, H=24),
        dtype,
        bias=lambda rng: normal(rng, (2, 2, 70, 140)),
        query_seq_lengths=np.array([65, 3]),
        key_value_seq_lengths=np.array([5, 129]),
    )
    expected = call.check(implementation)
    arrays = {n: x.copy() for n, x in call.arrays.items()}
    for b, (queries, keys) in enumerate(((65, 5), (3, 129))):
        arrays["query"][b, queries:] = bad
        arrays["key"][b, keys:] = bad
        arrays["value"][b, keys:] = bad
        arrays["bias"][b, :, queries:] = bad
        arrays["bias"][b, :, :, keys:] = bad
    spoilt = Call(arrays, {}, call.seed)
    spoilt.cotangents = call.cotangents
    for name, value in spoilt.flash(implementation).items():
        assert_same(value, expected[name], name)


@pytest.mark.parametrize(
    "sizes", [{"B": 0}, {"T": 0}, {"S": 0}, {"T": 0, "S": 0}, {"B": 0, "T": 0, "S": 0}], ids=str
)
@pytest.mark.parametrize("extras", [False, True])
def test_zero_sizes(implementation, sizes, extras):
    shape = Shape(**{"B": 2, "T": 5, "S": 6, "N": 4, "K": 2, "H": 8, "Hv": 3, **sizes})
    batch = shape.B
    arguments = {
        "bias": lambda rng: normal(rng, (batch, 4, shape.T, shape.S)),
        "mask": lambda rng: rng.random((1, 1, shape.T, shape.S)) < 0.9,
        "sinks": lambda rng: normal(rng, 4),
        "scale": np.asarray(0.5, np.float32),
        "query_seq_lengths": np.full(batch, 3),
        "key_value_seq_lengths": np.full(batch, 4),
        "is_causal": True,
        "dropout_rate": 0.2,
        "dropout_key": jax.random.key(0),
    }
    call = make_call(shape, **(arguments if extras else {}))
    got = call.check(implementation)
    assert got["output"].shape == (batch, shape.T, 4, 3)
    assert got["d_key"].shape == call.arrays["key"].shape


def test_zero_size_under_vmap(implementation):
    q = jnp.zeros((0, 5, 2, 4))
    output = jax.vmap(lambda x: flash_attention(x, x, x, implementation=implementation))(q)
    assert output.shape == q.shape


@pytest.mark.parametrize("dtype", [np.float32, bfloat16(), np.float16], ids=str)
@pytest.mark.parametrize("S", [1, 8, 130])
def test_logits_around_minus_a_million(implementation, S, dtype):
    """No finite stand-in for minus infinity: such a row is an ordinary one, gradients included.

    300 * -300 * 64 and its multiples are exact in float32, so that the answer is known exactly.
    """
    q = np.full((1, 8, 1, 64), 256, dtype)
    k = np.full((1, S, 1, 64), -256, dtype)
    call = make_call(Shape(B=1, T=8, S=S, N=1, H=64), dtype, scale=1.0)
    call = Call({**call.arrays, "query": q, "key": k}, call.options, call.seed)
    got = call.check(implementation)
    mean = call.arrays["value"].astype(np.float64).mean(1, keepdims=True)
    np.testing.assert_allclose(
        got["output"].astype(np.float64), np.broadcast_to(mean, (1, 8, 1, 64)), atol=1e-2
    )
    np.testing.assert_allclose(got["lse"], -(256**2) * 64 + np.log(S), rtol=2e-7)
    np.testing.assert_allclose(
        got["d_value"].astype(np.float32).sum(1),
        call.cotangents[0].astype(np.float32).sum(1),
        rtol=0.05,
        atol=0.2,
    )


@pytest.mark.parametrize("scale", [1e-40, -1e-40])
def test_scale_that_is_not_a_normal_number(implementation, scale):
    """Its reciprocal is infinite; every key counts the same."""
    call = make_call(Shape(T=9, S=21), scale=np.array(scale, np.float32), is_causal=True)
    even = make_call(Shape(T=9, S=21), scale=np.array(0, np.float32), is_causal=True)
    even = Call({**call.arrays, "scale": even.arrays["scale"]}, call.options, call.seed)
    got, expected = call.flash(implementation), even.flash(implementation)
    for name in ("output", "lse", "d_value"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-6, atol=1e-6)
    assert all(np.isfinite(value).all() for value in got.values())


@pytest.mark.parametrize("scale", [1e8, 1e10, -1e12])
def test_logits_whose_rounding_errors_are_huge(implementation, scale):
    """However large logits are, probabilities of a row add up to 1, and gradients are numbers."""
    rng = np.random.default_rng(0)
    query, key = normal(rng, (1, 40, 2, 16)), normal(rng, (1, 40, 2, 16))

    def attend(query, key, value):
        return flash_attention(
            query, key, value, scale=scale, implementation=implementation, return_residual=True
        )

    output, lse = jax.jit(attend)(query, key, jnp.ones((1, 40, 2, 8)))
    np.testing.assert_allclose(output, 1, rtol=1e-6)
    assert np.isfinite(lse).all()
    gradients = jax.grad(lambda *a: (attend(*a)[0] ** 2).sum(), (0, 1, 2))(query, key, query)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("center", [-1e6, 1e6, -3e4])
def test_differences_between_huge_logits_survive(implementation, center):
    """Logits a few units apart around a huge number: the softmax of their differences.

    All numbers are multiples of 1/8 below 2^21: exact in float32, statistics included.
    """
    rng = np.random.default_rng(0)
    q = np.concatenate([np.ones((1, 9, 1, 1)), rng.integers(-8, 8, (1, 9, 1, 3)) / 4], -1)
    k = np.concatenate(
        [np.full((1, 140, 1, 1), center), rng.integers(-8, 8, (1, 140, 1, 3)) / 2], -1
    )
    call = make_call(Shape(B=1, T=9, S=140, N=1, H=4, Hv=16), scale=1.0)
    arrays = {**call.arrays, "query": q.astype(np.float32), "key": k.astype(np.float32)}
    got = Call(arrays, call.options, call.seed).flash(implementation)
    shifted = k.copy()
    shifted[..., 0] = 0
    plain = Call({**arrays, "key": shifted.astype(np.float32)}, call.options, call.seed)
    expected = plain.flash(implementation)
    np.testing.assert_allclose(got["output"], expected["output"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["d_value"], expected["d_value"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["d_key"], expected["d_key"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        got["d_query"][..., 1:], expected["d_query"][..., 1:], rtol=1e-4, atol=1e-5
    )


def test_bias_of_minus_a_million(implementation):
    """The same through the bias, with each row's level its own."""
    rng = np.random.default_rng(1)
    levels = np.array([-1e6, -1e5, 0, 1e5, 1e6, -123456, 3, -1e6, -1e6])
    bias = (levels[:, None] + rng.integers(-16, 16, (9, 140)) / 8).astype(np.float32)
    call = make_call(Shape(B=1, T=9, S=140, N=1), bias=bias[None, None])
    arrays = {**call.arrays, "query": np.zeros_like(call.arrays["query"])}
    got = Call(arrays, {}, call.seed).check(implementation)
    leveled = Call(
        {**arrays, "bias": (bias - levels[:, None]).astype(np.float32)[None, None]}, {}, call.seed
    )
    np.testing.assert_allclose(
        got["output"], leveled.flash(implementation)["output"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-30, 40.0, -40.0])
@pytest.mark.parametrize("traced", [False, True])
def test_scales(implementation, scale, traced):
    """Zero, negative, tiny and huge; a zero scale still has a gradient of its own."""
    scale = np.asarray(scale, np.float32) if traced else scale
    got = make_call(Shape(T=9, S=140), scale=scale).check(implementation)
    if traced:
        assert got["d_scale"] != 0 or abs(scale) >= 40


@pytest.mark.parametrize("sign", [1, -1])
def test_one_key_takes_all(implementation, sign):
    """Logits of +-1e4 apart: probabilities of exactly 0 and 1, gradients finite."""
    call = make_call(Shape(T=9, S=140), scale=sign * 1e4)
    got = call.check(implementation)
    assert all(np.isfinite(x).all() for x in got.values())


@pytest.mark.parametrize("sink", [-np.inf, -1e30, -1e6, 0.0, 1e6])
def test_sinks_of_any_size(implementation, sink):
    """A sink of -inf is no sink; a huge one takes all the weight."""
    call = make_call(Shape(T=9, S=21), sinks=np.full(2, sink, np.float32))
    call.check(implementation)


def test_sink_of_minus_infinity_and_an_empty_row(implementation):
    call = make_call(
        Shape(T=9, S=5), sinks=np.array([-np.inf, 0.5], np.float32), is_causal=True, query_offset=-3
    )
    got = call.check(implementation)
    assert (got["lse"][:, :3, 0] == -np.inf).all()
    assert (got["lse"][:, :3, 1] == 0.5).all()


@pytest.mark.parametrize("value", [0.0, np.finfo(np.float32).tiny, 1e-40])
def test_zero_and_subnormal_inputs(implementation, value):
    call = make_call(Shape(T=9, S=21))
    for name in QKV:
        call.arrays[name] = np.full_like(call.arrays[name], value)
    got = call.flash(implementation)
    assert all(np.isfinite(x).all() for x in got.values())
    np.testing.assert_allclose(got["lse"], np.log(21), rtol=1e-6)


def test_nan_in_a_visible_value_is_not_hidden(implementation):
    """Only what is hidden may be ignored: a NaN the model computed must show."""
    call = make_call(Shape(B=2, T=3, S=21, N=1))
    call.arrays["value"][1, 4] = np.nan
    output = call.flash(implementation, gradients=False)["output"]
    assert np.isfinite(output[0]).all()
    assert np.isnan(output[1]).all()


def test_nan_in_a_visible_key_is_not_hidden(implementation):
    call = make_call(Shape(B=2, T=3, S=140, N=1))
    call.arrays["key"][1, 129] = np.nan
    got = call.flash(implementation)
    assert np.isfinite(got["output"][0]).all()
    assert np.isnan(got["output"][1]).all()
    assert np.isnan(got["lse"][1]).all()


@pytest.mark.parametrize("S", [4, 70, 700])
def test_nan_query_is_not_hidden(implementation, S):
    """Its row is none that sees nothing, whose gradients are zeros."""
    call = make_call(Shape(B=2, T=S, S=S, N=1))
    call.arrays["query"][1, 2] = np.nan
    got = call.flash(implementation)
    for name in ("output", "lse", "d_query"):
        assert np.isnan(got[name][1, 2]).all(), name
    for name in ("d_key", "d_value"):
        assert np.isnan(got[name][1]).all(), name
        assert np.isfinite(got[name][0]).all(), name
    for name in ("output", "lse", "d_query"):
        assert np.isfinite(got[name][:, 3:]).all(), name


@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
@pytest.mark.parametrize("S", [4, 70, 700])
@pytest.mark.parametrize("signs", ["same", "both"])
def test_logits_that_overflow_are_not_hidden(implementation, signs, S, dtype):
    """Rows that see an infinite logit are NaN, and so are the gradients of its key."""
    call = make_call(Shape(B=2, T=S, S=S, N=1), dtype)
    # Not a number of few bits: where float32 is split in two, products of the rest overflow too.
    call.arrays["query"][1] = call.arrays["key"][1] = 1e30
    if signs == "both":
        call.arrays["key"][1, 1::2] = -1e30
    got = {name: x.astype(np.float32) for name, x in call.flash(implementation).items()}
    for name in ("output", "lse", "d_query"):
        assert np.isnan(got[name][1]).all(), name
    for name in ("d_key", "d_value"):
        assert np.isnan(got[name][1, ::2]).all(), name
    for name, x in got.items():
        assert np.isfinite(x[0]).all(), name


@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
@pytest.mark.parametrize("S", [4, 70, 700])
def test_logits_that_overflow_to_minus_infinity(implementation, S, dtype):
    """All weight is the other key's, or, where products of the rest overflow, rows are NaN."""
    call = make_call(Shape(B=1, T=S, S=S, N=1), dtype)
    call.arrays["query"][:] = 1e30
    call.arrays["key"][:] = -1e30
    call.arrays["key"][:, S // 2] = 0
    got = call.flash(implementation, gradients=False)
    limits = {"output": call.arrays["value"][:, S // 2, None], "lse": np.float32(0)}
    for name, limit in limits.items():
        is_limit = np.array_equal(got[name], np.broadcast_to(limit, got[name].shape))
        assert is_limit or np.isnan(got[name].astype(np.float32)).all(), name


def test_large_values_do_not_overflow_half_precision(implementation):
    """float16 inputs near its maximum: accumulated in float32, and the output is their mean."""
    call = make_call(Shape(B=1, T=3, S=130, N=1), np.float16)
    call.arrays["value"] = np.full_like(call.arrays["value"], 60000)
    output = call.flash(implementation, gradients=False)["output"]
    np.testing.assert_array_equal(output, np.full_like(output, 60000))
