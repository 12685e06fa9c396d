"""Who sees whom: every rule alone, at its corners, and all of them conjoined."""

import numpy as np
import pytest

from calls import Call, Shape, bfloat16, compare, make_call
from jaxflash import flash_attention


def seen_keys(implementation, T, S, **arguments):
    """Bool `[T,S]`: which keys each query of an implementation really averages over.

    With q=0 all visible keys weigh the same; the one-hot values make the output the list of them.
    """
    q, k = np.zeros((T, 1, 4), np.float32), np.zeros((S, 1, 4), np.float32)
    v = np.eye(S, dtype=np.float32)[:, None]
    output = flash_attention(q, k, v, **arguments, implementation=implementation)[:, 0]
    counts = np.maximum((np.asarray(output) > 0).sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(output, (output > 0) / counts, rtol=1e-5)
    return np.asarray(output) > 0


@pytest.mark.parametrize(("T", "S"), [(5, 5), (2, 5), (5, 2), (130, 200), (200, 70)])
@pytest.mark.parametrize("offset", [0, "S-T", 3, -3, 1000, -1000])
def test_causal_corner(implementation, T, S, offset):
    """Top-left by default; `S - T` makes it bottom-right."""
    offset = S - T if offset == "S-T" else offset
    i, j = np.ogrid[:T, :S]
    got = seen_keys(implementation, T, S, is_causal=True, query_offset=np.int32(offset))
    np.testing.assert_array_equal(got, j <= i + offset)


@pytest.mark.parametrize(
    "window",
    [0, 1, 5, (0, 3), (3, 0), (2, None), (None, 2), (None, None), (1000, 1000), (64, 63)],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_window(implementation, window, is_causal):
    T, S, offset = 70, 140, 33
    left, right = window if isinstance(window, tuple) else (window, window)
    i, j = np.ogrid[:T, :S]
    expected = (j <= i + offset) if is_causal else np.ones((T, S), bool)
    expected &= (left is None) | (j >= i + offset - (left or 0))
    expected &= (right is None) | (j <= i + offset + (right or 0))
    got = seen_keys(
        implementation,
        T,
        S,
        is_causal=is_causal,
        local_window_size=window,
        query_offset=np.int32(offset),
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("extreme", [-(2**31), 2**31 - 1, 2**30, -(2**30)])
@pytest.mark.parametrize("window", [(None, 0), (0, None), (1000, 1000)], ids=str)
def test_extreme_offsets_do_not_wrap(implementation, extreme, window):
    """Far beyond the keys on either side: everything or nothing is visible."""
    left, right = window
    before, after = extreme < 0, extreme > 0
    expected = (before and right is None) or (after and left is None)
    got = seen_keys(implementation, 3, 5, local_window_size=window, query_offset=np.int32(extreme))
    np.testing.assert_array_equal(got, np.full((3, 5), expected))


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("offset", [0, 3, -3])
def test_huge_windows_are_no_limit(implementation, size, offset):
    i, j = np.ogrid[:3, :5]
    arguments = {"query_offset": np.int32(offset), "implementation": implementation}
    for window, expected in (
        ((size, size), np.ones((3, 5), bool)),
        ((size, 0), j <= i + offset),
        ((0, size), j >= i + offset),
    ):
        got = seen_keys(T=3, S=5, local_window_size=window, **arguments)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "length", [0, 1, 63, 64, 65, 127, 128, 129, 140, 141, -5, 2**31 - 1, -(2**31)]
)
def test_key_value_length(implementation, length):
    """Beyond the axis counts as its size, negative as 0."""
    got = seen_keys(implementation, 3, 140, key_value_seq_lengths=np.int32(length))
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(140) < length, (3, 140)))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 70, 71, -5, 2**31 - 1, -(2**31)])
def test_query_length(implementation, length):
    got = seen_keys(implementation, 70, 5, query_seq_lengths=np.int32(length))
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(70)[:, None] < length, (70, 5)))


SEGMENTS = {
    "packed": (np.arange(70) // 30, np.arange(140) // 60),
    "unordered": (np.arange(70) * 7 % 5 - 2, np.arange(140) * 11 % 5 - 2),
    "extremes": (
        np.array([2**31 - 1, -(2**31), 0, -1, 1] * 14),
        np.array([-(2**31), 2**31 - 1, 1, 0, -1] * 28),
    ),
    "disjoint": (np.zeros(70, int), np.ones(140, int)),
}


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("dtype", [np.int32, np.int16, np.int8, np.uint8, np.uint32])
def test_segment_ids(implementation, name, dtype):
    """Any integers in any order, narrow and unsigned ones too."""
    queries, keys = (ids.astype(dtype) for ids in SEGMENTS[name])
    got = seen_keys(implementation, 70, 140, query_segment_ids=queries, key_value_segment_ids=keys)
    np.testing.assert_array_equal(got, queries[:, None] == keys[None, :])


def test_lengths_and_offsets_of_each_batch_entry(implementation):
    call = make_call(
        Shape(B=5, T=9, S=140, N=2),
        query_seq_lengths=np.array([9, 0, 4, 9, 7], np.int32),
        key_value_seq_lengths=np.array([140, 3, 0, 129, 64], np.int32),
        query_offset=np.array([0, 2, 100, 125, -3], np.int32),
        is_causal=True,
    )
    call.check(implementation)


@pytest.mark.parametrize("offset", [3, np.int32(3), np.array(3), np.array([3, -2])], ids=repr)
def test_query_offset_forms(implementation, offset):
    """Python integer, NumPy scalar, array scalar, or one for each batch entry."""
    make_call(Shape(B=2, T=9, S=21), query_offset=offset, is_causal=True).check(implementation)


MASK_SHAPES = [
    (2, 4, 70, 140),
    (1, 1, 70, 140),
    (2, 1, 1, 140),
    (1, 4, 70, 1),
    (1, 1, 1, 1),
    (2, 1, 70, 1),
]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_mask_of_each_broadcast_shape(implementation, shape):
    call = make_call(
        Shape(B=2, T=70, S=140, N=4, K=2, H=8), mask=lambda rng: rng.random(shape) < 0.6
    )
    call.check(implementation)


@pytest.mark.parametrize("mask", [True, False])
def test_constant_mask(implementation, mask):
    got = seen_keys(implementation, 3, 5, mask=np.full((1, 1, 1), mask))
    assert (got == mask).all()


def test_bias_of_minus_infinity_hides_as_a_mask_does(implementation):
    hidden = np.random.default_rng(0).random((2, 2, 70, 140)) < 0.5
    hidden[0, 1, 3] = True  # a row that sees nothing
    bias = make_call(Shape(T=70, S=140), bias=np.where(hidden, -np.inf, 0).astype(np.float32))
    mask = Call({n: bias.arrays[n] for n in ("query", "key", "value")} | {"mask": ~hidden})
    by_bias, by_mask = bias.check(implementation), mask.check(implementation)
    for name in by_mask:
        np.testing.assert_allclose(by_bias[name], by_mask[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
def test_all_rules_conjoined(implementation, dtype):
    call = make_call(
        Shape(B=3, T=70, S=200, N=4, K=1, H=8),
        dtype,
        mask=lambda rng: rng.random((3, 1, 70, 200)) < 0.9,
        bias=lambda rng: np.where(rng.random((1, 4, 1, 200)) < 0.9, 0, -np.inf).astype(np.float32),
        is_causal=True,
        local_window_size=(70, 20),
        query_offset=np.array([0, 130, -5], np.int32),
        query_seq_lengths=np.array([70, 69, 64], np.int32),
        key_value_seq_lengths=np.array([200, 190, 128], np.int32),
        query_segment_ids=lambda rng: np.sort(rng.integers(0, 3, (3, 70))),
        key_value_segment_ids=lambda rng: np.sort(rng.integers(0, 3, (3, 200))),
    )
    call.check(implementation)


def test_causal_equals_its_mask_and_its_window(implementation):
    """Three ways to write one rule give one result (through different tile bounds)."""
    base = make_call(Shape(T=130, S=257, N=2, K=1))
    i, j = np.ogrid[:130, :257]
    ways = {
        "causal": Call(base.arrays, {"is_causal": True}),
        "window": Call(base.arrays, {"local_window_size": (None, 0)}),
        "mask": Call(base.arrays | {"mask": (j <= i)[None, None]}),
    }
    results = {name: call.check(implementation) for name, call in ways.items()}
    for name in ("window", "mask"):
        for key, value in results["causal"].items():
            np.testing.assert_allclose(results[name][key], value, rtol=1e-4, atol=1e-5)


def test_sliced_batch_equals_padded_batch(implementation):
    """Lengths mean the call on the sliced arrays, gradients included."""
    padded = make_call(
        Shape(B=1, T=70, S=140),
        query_seq_lengths=np.array([41]),
        key_value_seq_lengths=np.array([97]),
    )
    arrays = padded.arrays
    sliced = Call(
        {
            "query": arrays["query"][:, :41],
            "key": arrays["key"][:, :97],
            "value": arrays["value"][:, :97],
        }
    )
    sliced.cotangents = tuple(c[:, :41] for c in padded.cotangents)
    whole, part = padded.check(implementation), sliced.check(implementation)
    for name, expected in part.items():
        np.testing.assert_allclose(
            whole[name][:, : expected.shape[1]], expected, rtol=1e-5, atol=1e-6
        )


def test_mask_that_sees_a_single_key_copies_its_value(implementation):
    mask = np.zeros((1, 1, 70, 140), bool)
    target = np.random.default_rng(0).integers(0, 140, 70)
    mask[0, 0, np.arange(70), target] = True
    call = make_call(Shape(B=1, T=70, S=140, N=1), mask=mask)
    output = call.check(implementation)["output"]
    # 2^-22: a float32 as the sum of the two TF32 numbers that tensor cores multiply.
    np.testing.assert_allclose(output[0, :, 0], call.arrays["value"][0, target, 0], rtol=2**-22)


def test_normal_is_not_hiding_a_mask_bug(implementation):
    """The comparison sees one key too many: the reference of another length is refused."""
    call = make_call(Shape(B=1, T=7, S=140), key_value_seq_lengths=np.array([100]))
    got = call.flash(implementation)
    wrong = Call(call.arrays | {"key_value_seq_lengths": np.array([101])}, {}, call.seed)
    compare(got, call)
    with pytest.raises(AssertionError, match="times the limit"):
        compare({"output": got["output"]}, wrong)
