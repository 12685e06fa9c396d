"""Bugs that users of other attention libraries reported, each as a small input.

The number in a test's name is that of the report in the project's collection. Some reports
are tested in the file that their subject belongs to.
"""

import functools
import itertools
import operator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tolerance
from calls import (
    QKV,
    Call,
    Shape,
    assert_same,
    bfloat16,
    compare,
    compiled,
    make_call,
    normal,
    yardstick,
)
from jaxflash import flash_attention

BF16 = bfloat16()


def finite(results):
    return all(np.isfinite(x.astype(np.float32)).all() for x in results.values())


# The reports that a CPU can check.
REPORTS = (
    "b01 b02 b04 b06 b07 b09 b11 b12 b14 b16 b17 b19 b21 b22 b24 b26 b27 b29 b31 "
    "b32 b34 b36 b37 b39 b41 b42 b44 b46 b47 b49 b51 b52 b54 b56 b57 b59 b61 b62 "
    "b64 b66 b67 b71 b72 b74 b76 b77 b79 b82 b84 b86 b87 b89 b91 b92 b94 b96 b97 "
    "b99 b101 b102 b104 b106 b107 b109 b111 b112 b114 b116 b117 b119 b121 b124 b134 b146 "
    "n01 n02 n04 n06 n07 n09 n11 "
)


def test_every_report_has_a_test():
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    missing = [report for report in REPORTS.split() if f"def test_{report}_" not in sources]
    assert not missing


# A. NaN, Inf, undefined rows


def test_b01_float32_bias_with_bfloat16_inputs(implementation):
    call = make_call(
        Shape(B=8, T=128, S=128, N=4, H=32), BF16, bias=lambda rng: normal(rng, (1, 4, 128, 128))
    )
    got = call.check(implementation)
    assert finite(got)
    assert got["d_bias"].dtype == np.float32


def test_b02_one_masked_row_spoils_no_other(implementation):
    mask = np.ones((1, 1, 4, 4), bool)
    mask[0, 0, 2] = False
    call = make_call(Shape(B=1, T=4, S=4, N=1, H=8), mask=mask)
    d_output, d_lse = (c.copy() for c in call.cotangents)
    d_output[:, 2] = d_lse[:, 2] = 0
    call.cotangents = (d_output, d_lse)
    got = call.check(implementation)
    rest = [0, 1, 3]
    without = Call(
        {**call.arrays, "query": call.arrays["query"][:, rest], "mask": mask[:, :, rest]}
    )
    without.cotangents = (d_output[:, rest], d_lse[:, rest])
    expected = without.check(implementation)
    for name in ("d_key", "d_value"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["d_query"][:, rest], expected["d_query"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [slice(0, 14), slice(100, 114)], ids=["first of a tile", "inside"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_b04_empty_rows_at_a_tile_start(implementation, rows, with_sinks):
    mask = np.ones((1, 1, 256, 256), bool)
    mask[:, :, rows] = False
    sinks = {"sinks": np.array([0.5, -1], np.float32)} if with_sinks else {}
    got = make_call(Shape(B=1, T=256, S=256, H=64), mask=mask, **sinks).check(implementation)
    assert not got["output"][:, rows].any()


def test_b06_lowest_finite_bias_equals_a_mask(implementation):
    lowest = np.zeros((1, 1, 1, 441), np.float32)
    lowest[..., :128] = np.finfo(np.float32).min
    call = make_call(Shape(B=1, T=441, S=441, H=64), bias=lowest)
    got = call.flash(implementation)
    assert finite(got)
    masked = Call({n: call.arrays[n] for n in QKV} | {"mask": lowest == 0}, {}, call.seed)
    for name, expected in masked.check(implementation).items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("S", [64, 192, 704])
def test_b07_all_logits_near_minus_120(implementation, S):
    call = make_call(
        Shape(B=1, T=S, S=S, N=1, H=64), BF16, mask=np.tril(np.ones((1, 1, S, S), bool))
    )
    for name in QKV:
        call.arrays[name] = (0.1 * call.arrays[name].astype(np.float32)).astype(BF16)
    call.arrays["query"][..., 0] = 1
    call.arrays["key"][..., 0] = -120 * 8
    assert finite(call.check(implementation))


def test_b09_no_finite_sentinel_for_the_running_maximum(implementation):
    call = make_call(Shape(B=1, T=8, S=8, N=1, H=64), scale=1.0)
    call.arrays |= {
        "query": np.full_like(call.arrays["query"], 300),
        "key": np.full_like(call.arrays["key"], -300),
    }
    got = call.flash(implementation)
    mean = call.arrays["value"].mean(1, keepdims=True)
    np.testing.assert_allclose(got["output"], np.broadcast_to(mean, got["output"].shape), atol=1e-6)
    np.testing.assert_allclose(got["lse"], -5.76e6 + np.log(8), rtol=1e-7)
    assert finite(got)


def test_b11_one_key_in_float16(implementation):
    call = make_call(Shape(B=1, T=1, S=1, N=1), np.float16)
    call.arrays = {n: 3 * x for n, x in call.arrays.items()}
    call.cotangents = (np.ones((1, 1, 1, 16), np.float16), np.zeros((1, 1, 1), np.float32))
    got = call.check(implementation)
    assert np.abs(got["d_query"]).max() < 0.02
    assert np.abs(got["d_key"]).max() < 0.02
    np.testing.assert_array_equal(got["d_value"], np.ones_like(got["d_value"]))


def test_b12_many_queries_few_keys_causal(implementation):
    call = make_call(
        Shape(B=3, T=146, S=1, N=2, H=32),
        np.float16,
        is_causal=True,
        query_seq_lengths=np.array([76, 34, 146]),
        key_value_seq_lengths=np.array([1, 1, 1]),
    )
    call.arrays |= {n: 3 * call.arrays[n] for n in QKV}
    assert call.check(implementation)["output"][0, 75].any()


def test_b12_bottom_right_causal(implementation):
    """The reporter's alignment: all queries but the last see nothing."""
    call = make_call(
        Shape(B=3, T=146, S=1, N=2, H=32),
        np.float16,
        is_causal=True,
        query_seq_lengths=np.array([76, 34, 146]),
        query_offset=np.array([-75, -33, -145]),
    )
    got = call.check(implementation)
    for b, last in enumerate((75, 33, 145)):
        assert got["output"][b, last].any()
        assert not got["output"][b, :last].any()


def test_b14_unused_cache_slots(implementation):
    call = make_call(
        Shape(B=2, T=3, S=3, N=1, H=64), np.float16, key_value_seq_lengths=np.array([1, 3])
    )
    for name in ("key", "value"):
        call.arrays[name][0, 1:] = np.nan
    assert finite(call.check(implementation))


@pytest.mark.usefixtures("x64")
def test_b16_float64_with_inf_debugging(float64_implementation):
    call = make_call(Shape(B=1, T=4, S=4, N=1, H=8), np.float64, is_causal=True)
    with jax.debug_infs(True):
        call.check(float64_implementation)


def test_b17_float16_with_a_padding_mask(implementation):
    mask = np.arange(16) < np.array([16, 9])[:, None, None, None]
    assert finite(
        make_call(Shape(B=2, T=16, S=16, N=2), np.float16, mask=mask).check(implementation)
    )


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_b19_bias_of_the_lowest_float16(implementation, dtype):
    def bias(rng):
        return np.where(rng.random((1, 1, 9, 21)) < 0.5, 0, np.finfo(np.float16).min).astype(
            np.float16
        )

    call = make_call(Shape(T=9, S=21), dtype, bias=bias)
    assert finite(call.check(implementation))
    call.cotangents = tuple(np.zeros_like(c) for c in call.cotangents)
    got = call.flash(implementation)
    assert not any(got["d_" + n].any() for n in (*QKV, "bias"))


def test_b21_padding_rows_of_gradients_are_zeros(implementation):
    call = make_call(
        Shape(B=2, T=128, S=128),
        query_seq_lengths=np.array([100, 100]),
        key_value_seq_lengths=np.array([100, 100]),
    )
    for _ in range(3):
        poison = [jnp.full(x.shape, jnp.nan) for x in call.arrays.values() for _ in range(4)]
        jax.block_until_ready(poison)
        del poison
        got = call.check(implementation)
        assert not any(got["d_" + n][:, 100:].any() for n in QKV)


def test_b22_ten_runs_of_an_odd_length(implementation):
    call = make_call(Shape(B=1, T=508, S=508, N=3, H=32), deterministic_gradients=True)
    first = call.check(implementation)
    for _ in range(9):
        for name, value in call.flash(implementation).items():
            np.testing.assert_array_equal(value, first[name])


def test_b24_empty_rows_do_not_spread_through_layers(implementation):
    pad = np.arange(9) < np.array([[9], [4]])
    mask = (pad[:, :, None] & pad[:, None, :])[:, None]
    arrays = make_call(Shape(B=2, T=9, S=9)).arrays

    def model(arrays):
        x = flash_attention(**arrays, mask=mask, implementation=implementation)
        x = flash_attention(x, x, x, mask=mask, implementation=implementation)
        return (x**2).sum(), x

    (_, output), gradients = jax.jit(jax.value_and_grad(model, has_aux=True))(arrays)
    assert finite({"output": np.asarray(output), **jax.tree.map(np.asarray, gradients)})
    assert not output[1, 4:].any()


# B. Wrong values or gradients


@pytest.mark.parametrize(("T", "S"), [(256, 512), (512, 256)])
def test_b26_lengths_differ(implementation, T, S):
    make_call(Shape(B=1, T=T, S=S, N=1, H=64)).check(implementation)


@pytest.mark.parametrize(("T", "S"), [(2, 5), (5, 2), (3, 128)])
@pytest.mark.parametrize("corner", ["top left", "bottom right"])
def test_b27_causal_corner(implementation, T, S, corner):
    offset = 0 if corner == "top left" else S - T
    q, k = np.zeros((T, 1, 4), np.float32), np.zeros((S, 1, 4), np.float32)
    v = np.broadcast_to(np.arange(S, dtype=np.float32)[:, None, None], (S, 1, 4))
    output = flash_attention(
        q, k, v, is_causal=True, query_offset=offset, implementation=implementation
    )
    last = np.minimum(np.arange(T) + offset, S - 1)
    expected = np.where(last >= 0, last / 2, 0)
    np.testing.assert_allclose(output[:, 0, 0], expected, rtol=1e-6)


def test_b29_padding_mask_of_one_row(implementation):
    lengths = np.array([32, 7, 1, 20])
    mask = (np.arange(32) < lengths[:, None])[:, None, None]
    call = make_call(Shape(B=4, T=32, S=32, N=4), mask=mask)
    got = call.check(implementation)
    expanded = Call(
        {**call.arrays, "mask": np.broadcast_to(mask, (4, 4, 32, 32)).copy()}, {}, call.seed
    )
    for name, expected in expanded.flash(implementation).items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "shape", [(1, 3, 37, 37), (2, 1, 37, 37), (1, 1, 37, 37), (2, 3, 1, 37), (1, 1, 1, 37)], ids=str
)
def test_b31_gradient_of_a_broadcast_bias(implementation, shape):
    got = make_call(Shape(B=2, T=37, S=37, N=3), bias=lambda rng: normal(rng, shape)).check(
        implementation
    )
    assert got["d_bias"].shape == shape


def test_b32_soft_cap_formula(implementation):
    call = make_call(Shape(T=64, S=64), logits_soft_cap=15.0)
    call.arrays["query"] *= 4
    call.arrays["key"] *= 4
    call.check(implementation)


def test_b34_soft_cap_backward_ends(implementation):
    call = make_call(
        Shape(B=2, T=130, S=130, N=4, H=128), BF16, is_causal=True, logits_soft_cap=10.0
    )
    assert finite(call.check(implementation))


def test_b36_gqa_gradients_are_summed_over_the_group(implementation):
    shape = Shape(T=33, S=33, N=8, K=2)
    call = make_call(shape)
    got = call.check(implementation)
    assert got["d_key"].shape == (2, 33, 2, 16)
    repeated = {n: x.repeat(4, axis=2) if n != "query" else x for n, x in call.arrays.items()}
    expected = Call(repeated, {}, call.seed).check(implementation)
    for name in ("d_key", "d_value"):
        summed = expected[name].reshape(2, 33, 2, 4, 16).sum(3)
        np.testing.assert_allclose(got[name], summed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("N", "K"), [(12, 3), (6, 1), (8, 8)])
@pytest.mark.parametrize(("H", "Hv"), [(64, 128), (128, 64)])
def test_b37_head_ratios_and_value_dims(implementation, N, K, H, Hv):
    make_call(Shape(B=1, T=21, S=33, N=N, K=K, H=H, Hv=Hv)).check(implementation)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_b39_structured_activations(implementation, dtype):
    """A large shared offset and a few huge channels, where Gaussians would pass."""
    call = make_call(Shape(B=3, T=70, S=70, N=4, K=2, H=256), dtype, is_causal=True)
    rng = np.random.default_rng(0)
    for name in ("query", "key"):
        x = call.arrays[name].astype(np.float32) + 2 * normal(rng, 256)
        x[..., :3] *= 8
        call.arrays[name] = (0.3 * x).astype(dtype)
    got = call.check(implementation)
    for b in range(3):
        one = Call({n: x[b : b + 1] for n, x in call.arrays.items()}, call.options)
        one.cotangents = tuple(c[b : b + 1] for c in call.cotangents)
        for name, value in one.flash(implementation).items():
            compare({name: value}, one)
            same = np.vdot(value.astype(float), got[name][b : b + 1].astype(float))
            norms = np.linalg.norm(value.astype(float)) * np.linalg.norm(got[name][b].astype(float))
            assert same > 0.999 * norms, name


def test_b41_all_of_128_channels_count(implementation):
    call = make_call(Shape(T=21, S=33, H=128))
    for name in ("query", "key"):
        call.arrays[name][..., :64] = 0
    got = call.check(implementation)
    mean = call.arrays["value"].mean(1, keepdims=True)
    assert np.abs(got["output"] - mean).max() > 0.1


def test_b42_gradients_without_causal(implementation):
    make_call(Shape(B=1, T=320, S=320, N=2, H=64), np.float16, is_causal=False).check(
        implementation
    )


@pytest.mark.parametrize("W", [0, 1, 5])
def test_b44_sliding_window_counts_exactly(implementation, W):
    q = np.zeros((40, 1, 4), np.float32)
    v = np.broadcast_to(np.arange(40, dtype=np.float32)[:, None, None], (40, 1, 4))
    output = flash_attention(q, q, v, local_window_size=(W, 0), implementation=implementation)
    i = np.arange(40)
    np.testing.assert_allclose(output[:, 0, 0], i - np.minimum(i, W) / 2, rtol=1e-6)


def test_b46_right_side_of_the_window(implementation):
    call = make_call(Shape(T=256, S=256), local_window_size=(16, 16), is_causal=False)
    got = call.check(implementation)
    dense = Call(call.arrays, {}, call.seed).flash(implementation, gradients=False)
    assert np.abs(got["output"] - dense["output"]).max() > 0.1


@pytest.mark.parametrize("window", [(-1, -3), (-1, -1), (-1, 0), (0, -1), -1], ids=str)
def test_b47_negative_windows_are_refused(implementation, window):
    x = jnp.zeros((1, 4, 1, 4))
    with pytest.raises(ValueError, match="local_window_size"):
        flash_attention(x, x, x, local_window_size=window, implementation=implementation)


def test_b49_unused_segment_slots(implementation):
    """Trailing padding ids of -1 and 0, and a row of nothing else."""
    ids = np.array([[0, 0, 1, 1, 2, -1, -1, -1], [-1] * 8, [5, 5, 0, 0, 0, 0, 0, 0]])
    call = make_call(
        Shape(B=3, T=8, S=8),
        query_segment_ids=ids,
        key_value_segment_ids=np.where(ids < 0, -2, ids),
    )
    first = call.check(implementation)
    assert not first["output"][1].any()
    assert not first["output"][0, 5:].any()
    for _ in range(20):
        np.testing.assert_array_equal(call.flash(implementation)["output"], first["output"])


def test_b51_key_lengths_without_query_lengths(implementation):
    lengths = np.array([24, 125, 53, 28])
    call = make_call(Shape(B=4, T=128, S=128, N=1, H=64), key_value_seq_lengths=lengths)
    got = call.check(implementation)
    changed = {n: x.copy() for n, x in call.arrays.items()}
    for b, length in enumerate(lengths):
        changed["key"][b, length:] = 7
        changed["value"][b, length:] = 7
    again = Call(changed, {}, call.seed)
    again.cotangents = call.cotangents
    for name, value in again.flash(implementation).items():
        assert_same(value, got[name], name)


def test_b52_dropout_is_the_same_each_time(implementation):
    call = make_call(Shape(T=70, S=140), dropout_rate=0.48, dropout_key=jax.random.key(3))
    first = call.check(implementation)
    for _ in range(25):
        np.testing.assert_array_equal(call.flash(implementation)["d_value"], first["d_value"])


def test_b54_remat_with_dropout(implementation):
    call = make_call(Shape(T=9, S=21), dropout_rate=0.5, dropout_key=jax.random.key(0))

    def loss(q, k, v):
        output = flash_attention(
            q, k, v, dropout_rate=0.5, dropout_key=jax.random.key(0), implementation=implementation
        )
        return (output**2).sum()

    qkv = tuple(call.arrays[n] for n in QKV)
    plain = jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv)
    remat = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*qkv)
    for a, b in zip(plain, remat, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_b56_transposed_cotangent(implementation):
    call = make_call(Shape(T=33, S=33, N=4, K=1))
    weight = np.random.default_rng(0).standard_normal((2, 4, 33, 16)).astype(np.float32)

    def loss(qkv):
        output = flash_attention(*qkv, implementation=implementation)
        return (output.transpose(0, 2, 1, 3) * weight).sum()

    gradients = jax.jit(jax.grad(loss))(tuple(call.arrays[n] for n in QKV))
    call.cotangents = (weight.transpose(0, 2, 1, 3), np.zeros((2, 33, 4), np.float32))
    results = dict(zip(("d_query", "d_key", "d_value"), map(np.asarray, gradients), strict=True))
    compare(results, call)


@pytest.mark.parametrize("S", [33, 65])
def test_b57_broadcast_keys_and_values(implementation, S):
    call = make_call(
        Shape(B=3, T=9, S=S, N=4, K=1), mask=lambda rng: rng.random((3, 1, 9, S)) < 0.7
    )
    k1, v1 = (call.arrays[n][:1, :, :1] for n in ("key", "value"))
    wide = (3, S, 4, 16)

    @jax.jit
    def broadcast(q, k, v):
        k, v = jnp.broadcast_to(k, wide), jnp.broadcast_to(v, wide)
        return flash_attention(q, k, v, mask=call.arrays["mask"], implementation=implementation)

    call.arrays |= {
        "key": np.broadcast_to(k1, wide).copy(),
        "value": np.broadcast_to(v1, wide).copy(),
    }
    compare({"output": np.asarray(broadcast(call.arrays["query"], k1, v1))}, call)


def test_b59_block_diagonal_mask(implementation):
    blocks = [(0, 32), (32, 64), (64, 96), (136, 150)]
    mask = np.zeros((1, 1, 150, 150), bool)
    for start, stop in blocks:
        mask[..., start:stop, start:stop] = True
    call = make_call(Shape(B=1, T=150, S=150, H=80), BF16, mask=mask)
    got = call.check(implementation)
    for start, stop in blocks:
        own = Call({n: call.arrays[n][:, start:stop] for n in QKV})
        own.cotangents = tuple(c[:, start:stop] for c in call.cotangents)
        own.check(implementation)
        compare({n: x[:, start:stop] for n, x in got.items()}, own)
    assert not got["output"][:, 96:136].any()


def test_b61_bias_is_not_scaled(implementation):
    make_call(Shape(T=9, S=21), scale=0.1, bias=lambda rng: 5 * normal(rng, (2, 2, 9, 21))).check(
        implementation
    )


def test_b62_heads_and_length_exchanged(implementation):
    """A `[B,N,T,H]` layout whose numbers don't fit gets a message with both shapes."""
    q, k = jnp.zeros((1, 4, 32, 64)), jnp.zeros((1, 4, 48, 64))
    with pytest.raises(ValueError, match=r"(?s)48.*32|32.*48"):
        flash_attention(q, k, k, implementation=implementation)


def test_b62_head_dim_above_256(implementation):
    x = jnp.zeros((1, 4, 2, 1025))
    with pytest.raises((ValueError, NotImplementedError), match=r"(?s)256.*1025|1025.*256"):
        flash_attention(x, x, x, implementation=implementation)


# C. Crashes, limits, sizes


def test_b64_batch_of_65536(implementation):
    x = jnp.zeros((65536, 2, 1, 8), jnp.float16)
    value = jnp.broadcast_to(jnp.arange(2, dtype=jnp.float16)[:, None, None], x.shape)

    def loss(q, k, v):
        return flash_attention(q, k, v, implementation=implementation).astype(jnp.float32).sum()

    total, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, x, value)
    assert total == 65536 * 2 * 8 * 0.5
    np.testing.assert_array_equal(gradients[2], np.ones_like(gradients[2]))


def test_b66_71280_heads(implementation):
    x = make_call(Shape(B=1, T=3, S=3, N=71280, H=4), BF16)
    got = x.flash(implementation)
    last = Call({n: a[:, :, -2:] for n, a in x.arrays.items()})
    last.cotangents = tuple(c[:, :, -2:] for c in x.cotangents)
    compare({n: a[:, :, -2:] for n, a in got.items()}, last)


def test_b67_last_entry_of_a_large_batch(implementation):
    call = make_call(Shape(B=1500, T=16, S=16, N=2, H=8), BF16)
    got = call.flash(implementation)
    last = Call({n: x[-1:] for n, x in call.arrays.items()})
    last.cotangents = tuple(c[-1:] for c in call.cotangents)
    for name, value in last.flash(implementation).items():
        compare({name: got[name][-1:]}, last)
        np.testing.assert_allclose(
            value.astype(np.float32), got[name][-1:].astype(np.float32), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize(
    ("query_shape", "key_shape"),
    [
        ((0, 8, 4, 64), (0, 8, 4, 64)),
        ((2, 0, 4, 64), (2, 0, 4, 64)),
        ((1, 0, 4, 64), (1, 8, 4, 64)),
    ],
    ids=str,
)
def test_b71_zero_sizes(implementation, query_shape, key_shape):
    q, k = np.zeros(query_shape, np.float32), np.zeros(key_shape, np.float32)
    got = Call({"query": q, "key": k, "value": k}).check(implementation)
    assert got["output"].shape == query_shape


def test_b71_zero_head_dim_is_refused(implementation):
    x = jnp.zeros((1, 4, 1, 0))
    with pytest.raises(ValueError, match="query"):
        flash_attention(x, x, x, implementation=implementation)


@pytest.mark.parametrize("is_causal", [False, True])
def test_b72_no_keys(implementation, is_causal):
    got = make_call(Shape(T=8, S=0), is_causal=is_causal).check(implementation)
    assert not got["output"].any()
    assert (got["lse"] == -np.inf).all()


def test_b74_some_sequences_empty(implementation):
    call = make_call(
        Shape(B=4, T=1, S=5, N=9, K=3, H=64),
        query_seq_lengths=np.array([0, 1, 0, 1]),
        key_value_seq_lengths=np.array([0, 3, 0, 5]),
    )
    call.check(implementation)


def test_b76_one_query_twenty_keys(implementation):
    make_call(Shape(B=4, T=1, S=20, N=32, H=128)).check(implementation)


@pytest.mark.parametrize("H", [1, 3, 7, 40, 63, 72, 80, 96, 100])
def test_b77_odd_head_dims(implementation, H):
    make_call(Shape(B=1, T=21, S=33, H=H), BF16 if H % 2 else np.float32).check(implementation)


@pytest.mark.parametrize("shape", [(2, 4, 77, 77), (1, 1, 43, 43)], ids=str)
def test_b79_bias_rows_of_odd_length(implementation, shape):
    B, _, T, S = shape
    make_call(
        Shape(B=B, T=T, S=S, N=4), np.float16, bias=lambda rng: normal(rng, shape, np.float16)
    ).check(implementation)


@pytest.mark.parametrize("T", [32, 128, 256])
def test_b82_shape_sweep(implementation, T):
    make_call(Shape(B=2, T=T, S=T, N=2, H=64 if T == 256 else 32)).check(implementation)


def test_b84_head_dim_of_40(implementation):
    make_call(Shape(T=70, S=140, H=40), is_causal=True).check(implementation)


# D. Transforms


def test_b86_vmap_of_grad(implementation):
    x = normal(np.random.default_rng(0), (2, 1, 4, 2, 8))
    gradient = jax.grad(lambda q: flash_attention(q, q, q, implementation=implementation).sum())
    mapped = jax.vmap(gradient)(x)
    for b in range(2):
        np.testing.assert_allclose(mapped[b], gradient(x[b]), rtol=1e-5, atol=1e-6)


MIXES = [m for m in itertools.product((0, None), repeat=4) if m != (None,) * 4]


@pytest.mark.parametrize("mix", MIXES, ids=lambda m: "".join("-" if a is None else "m" for a in m))
def test_b87_partial_in_axes(implementation, mix):
    """Batched calls under vmap: each mapped or unmapped operand, and sums over unmapped ones."""
    rng = np.random.default_rng(0)
    shapes = ((2, 4, 2, 8), (2, 5, 1, 8), (2, 5, 1, 8), (1, 2, 4, 5))
    arrays = [normal(rng, (3, *s) if axis == 0 else s) for s, axis in zip(shapes, mix, strict=True)]
    cotangent = normal(rng, (3, 2, 4, 2, 8))
    attend = functools.partial(flash_attention, implementation=implementation)

    @jax.jit
    def run(*arrays):
        output, pull = jax.vjp(jax.vmap(attend, mix), *arrays)
        return output, pull(cotangent)

    output, gradients = jax.tree.map(np.asarray, run(*arrays))
    calls = []
    for b in range(3):
        own = [x[b] if axis == 0 else x for x, axis in zip(arrays, mix, strict=True)]
        calls.append(Call(dict(zip((*QKV, "bias"), own, strict=True))))
        calls[b].cotangents = (cotangent[b], np.zeros((2, 4, 2), np.float32))
        compare({"output": output[b]}, calls[b])
    for name, gradient, axis in zip((*QKV, "bias"), gradients, mix, strict=True):
        measures = [yardstick("d_" + name, call) for call in calls]
        if axis == 0:
            for b, measure in enumerate(measures):
                tolerance.assert_close(name, gradient[b], measure)
        else:
            tolerance.assert_close(name, gradient, functools.reduce(operator.add, measures))


def test_b91_forward_mode(implementation):
    """A dot product test: forward mode is the transpose of reverse mode."""
    call = make_call(Shape(T=9, S=21, N=4, K=2), is_causal=True)
    rng = np.random.default_rng(0)
    primals = tuple(call.arrays[n] for n in QKV)
    tangents = tuple(normal(rng, x.shape) for x in primals)

    def attend(*qkv):
        return flash_attention(
            *qkv, is_causal=True, return_residual=True, implementation=implementation
        )

    _, pushed = jax.jvp(attend, primals, tangents)
    got = call.check(implementation)
    forward = sum(np.vdot(c, t) for c, t in zip(call.cotangents, pushed, strict=True))
    reverse = sum(np.vdot(got["d_" + n], t) for n, t in zip(QKV, tangents, strict=True))
    np.testing.assert_allclose(forward, reverse, rtol=1e-4)


def test_b92_second_order_is_not_zero(implementation):
    x = normal(np.random.default_rng(0), (1, 8, 1, 4))

    def loss(q):
        return (flash_attention(q, x, x, implementation=implementation) ** 2).sum()

    hessian = jax.hessian(loss)(x).reshape(32, 32)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-4)
    step = 1e-2 * normal(np.random.default_rng(1), x.shape)
    change = (jax.grad(loss)(x + step) - jax.grad(loss)(x - step)).ravel()
    np.testing.assert_allclose(hessian @ (2 * step.ravel()), change, rtol=0.02, atol=2e-5)
    penalty = jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum())(x)
    np.testing.assert_allclose(
        penalty.ravel(), 2 * hessian @ jax.grad(loss)(x).ravel(), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("used", ["both", "lse only"])
def test_b96_gradient_through_the_log_sum_exp(implementation, used):
    call = make_call(Shape(B=1, T=5, S=7, N=2, H=4))
    qkv = tuple(call.arrays[n] for n in QKV)

    def loss(*qkv):
        output, lse = flash_attention(*qkv, return_residual=True, implementation=implementation)
        return (lse**2).sum() + (output.sum() if used == "both" else 0)

    gradients = jax.grad(loss, (0, 1, 2))(*qkv)
    lse = call.flash(implementation)["lse"]
    d_output = np.full_like(call.cotangents[0], used == "both")
    call.cotangents = (d_output, 2 * lse)
    compare({"d_" + n: np.asarray(g) for n, g in zip(QKV, gradients, strict=True)}, call)


# F. Dtypes


def test_b111_float32_has_float32_accuracy(implementation):
    call = make_call(Shape(B=1, T=65, S=65, H=64))
    output = call.check(implementation)["output"]
    exact = call.reference(None)["output"]
    assert np.abs(output - exact).max() < 2e-6 * np.abs(exact).max()


@pytest.mark.usefixtures("x64")
def test_b112_bfloat16_in_64_bit_mode(implementation):
    x = np.ones((2, 49, 8, 64), BF16)
    arguments = {
        "query_segment_ids": np.zeros((2, 49), np.int64),
        "key_value_segment_ids": np.zeros((2, 49), np.int64),
    }
    arrays = {
        "query": x,
        "key": x,
        "value": x,
        "key_value_seq_lengths": np.array([49, 9]),
        **arguments,
    }
    call = Call(arrays, {"local_window_size": 48, "logits_soft_cap": 30.0, "scale": 0.125})
    got = call.check(implementation)
    np.testing.assert_array_equal(got["output"], x)
    assert {got["d_" + n].dtype for n in QKV} == {BF16}


def test_b114_bool_mask_with_a_float32_bias(implementation):
    make_call(
        Shape(T=9, S=21),
        BF16,
        mask=lambda rng: rng.random((2, 1, 9, 21)) < 0.6,
        bias=lambda rng: normal(rng, (1, 2, 9, 21)),
    ).check(implementation)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_b114_masks_that_are_not_bool_are_refused(implementation, dtype):
    arrays = make_call(Shape(T=9, S=21)).arrays
    with pytest.raises((TypeError, ValueError), match=f"(?s)mask.*bool.*{np.dtype(dtype).name}"):
        flash_attention(**arrays, mask=np.ones((1, 1, 9, 21), dtype), implementation=implementation)


# J. Probes


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.bool_])
def test_n02_weak_and_numpy_typed_flags(implementation, kind):
    """Python and NumPy scalars and bools: the same trace, the same dtype."""
    arrays = make_call(Shape(T=9, S=21), BF16).arrays
    attend = functools.partial(flash_attention, **arrays, implementation=implementation)
    if kind is np.bool_:
        python, numpy = {"is_causal": True}, {"is_causal": np.bool_(True)}
    else:
        python = {"scale": 0.5, "logits_soft_cap": 2.0}
        numpy = {n: kind(x) for n, x in python.items()}
    a, b = attend(**python), attend(**numpy)
    assert a.dtype == b.dtype == BF16
    np.testing.assert_array_equal(a, b)


def test_n02_weak_typed_scale_does_not_retrace(implementation):
    arrays = make_call(Shape(T=9, S=21)).arrays
    traces = []

    @jax.jit
    def run(scale):
        traces.append(None)
        return flash_attention(**arrays, scale=scale, implementation=implementation)

    assert run(0.5).dtype == run(0.25).dtype == np.float32
    assert len(traces) == 1


def test_n11_only_the_bias_gradient(implementation):
    call = make_call(Shape(T=70, S=140), bias=lambda rng: normal(rng, (1, 2, 70, 140)))
    expected = call.check(implementation)
    got = compiled(implementation, ("bias",), ())(call.arrays, call.cotangents)
    np.testing.assert_allclose(got["d_bias"], expected["d_bias"], rtol=1e-5, atol=1e-6)


def test_n11_unwanted_gradients_cost_no_kernel_output(native):
    """The gradient of the query alone: those of key and value are no results of the kernel."""
    call = make_call(Shape(T=70, S=140))
    text = compiled(native, ("query",), ()).lower(call.arrays, call.cotangents).compile().as_text()
    (line,) = [x for x in text.splitlines() if 'custom_call_target="jaxflash_backward"' in x]
    results = line.split("custom-call(")[0]
    assert "f32[2,70,2,16]" in results
    assert "f32[2,140" not in results
