"""The reference itself: against known answers, finite differences and `jax.nn`."""

import jax
import numpy as np
import pytest

import reference
from calls import Shape, make_call, normal

# Random123's published known answers for philox4x32 (kat_vectors).
PHILOX_ANSWERS = {
    7: [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
    10: [((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8))],
}


@pytest.mark.parametrize("rounds", PHILOX_ANSWERS)
def test_philox_known_answers(rounds):
    for counter, key, answer in PHILOX_ANSWERS[rounds]:
        assert tuple(int(w) for w in reference.philox(counter, key, rounds)) == answer


def test_dropout_uses_every_lane_once():
    """The 16 x 16 draws of a block are 32 Philox calls of 8 lanes: they differ from each other."""
    rng_key = jax.random.key(3)
    thresholds = np.zeros((16, 16), int)
    for bit in reversed(range(16)):  # binary search for each draw: the largest kept threshold
        for i, j in np.ndindex(16, 16):
            thresholds[i, j] |= 1 << bit
        rates = {
            r: reference.dropout_factors(rng_key, r / 65536, 1, 1, 16, 16)[0, 0]
            for r in np.unique(thresholds)
        }
        for i, j in np.ndindex(16, 16):
            if not rates[thresholds[i, j]][i, j]:
                thresholds[i, j] ^= 1 << bit
    assert len(np.unique(thresholds)) > 250


EVERYTHING = dict(
    bias=lambda rng: normal(rng, (2, 1, 5, 1), np.float64),
    mask=lambda rng: rng.random((1, 4, 1, 6)) < 0.9,
    sinks=lambda rng: normal(rng, 4, np.float64),
    scale=np.asarray(0.3),
    query_seq_lengths=np.array([4, 5]),
    key_value_seq_lengths=np.array([6, 5]),
    query_offset=np.array([1, -1]),
    query_segment_ids=np.array([[0, 0, 1, 1, 1], [7, 7, 7, -3, -3]]),
    key_value_segment_ids=np.array([[0, 0, 0, 1, 1, 1], [7, 7, 7, -3, -3, -3]]),
    local_window_size=(2, 1),
    logits_soft_cap=1.5,
    dropout_rate=0.25,
    dropout_key=jax.random.key(1),
)


@pytest.mark.parametrize("names", [(), tuple(EVERYTHING)], ids=["plain", "everything"])
def test_gradients_match_finite_differences(names):
    shape = Shape(B=2, T=5, S=6, N=4, K=2, H=3, Hv=2)
    call = make_call(shape, np.float64, **{n: EVERYTHING[n] for n in names})
    precision = reference.exact(np.float64)
    exact = call.reference(precision)
    d_output, d_lse = call.cotangents

    def loss(name, x):
        arrays = {**call.arrays, name: x}
        r = reference.attention(**arrays, **call.options, precision=precision)
        finite = np.isfinite(r["lse"])
        return (r["output"] * d_output).sum() + (r["lse"][finite] * d_lse[finite]).sum()

    rng = np.random.default_rng(0)
    for name in {"query", "key", "value", "bias", "sinks", "scale"} & set(call.arrays):
        x = call.arrays[name]
        direction = rng.standard_normal(x.shape)
        step = 1e-6 * direction
        slope = (loss(name, x + step) - loss(name, x - step)) / 2e-6
        np.testing.assert_allclose(
            float((exact["d_" + name] * direction).sum()), float(slope), rtol=1e-7
        )
        assert abs(slope) > 1e-3, "a gradient of 0 would prove nothing"


def test_magnitudes_bound_the_results():
    call = make_call(Shape(T=5, S=6), bias=lambda rng: normal(rng, (1, 1, 5, 6)))
    result = call.reference(reference.exact(np.float32))
    for name, magnitude in result["magnitude"].items():
        assert magnitude >= np.abs(result[name]).max() * (1 - 1e-9) or name == "lse"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"local_window_size": 2},
        {"local_window_size": (3, 1)},
        {"bias": lambda rng: normal(rng, (2, 4, 9, 9))},
        {"mask": lambda rng: (rng.random((2, 1, 9, 9)) < 0.5) | np.eye(9, dtype=bool)},
        {"key_value_seq_lengths": np.array([3, 9], np.int32)},
        {"scale": 0.7, "is_causal": True, "local_window_size": (2, 0)},
    ],
    ids=lambda a: "-".join(a) or "plain",
)
def test_agrees_with_jax_nn(arguments):
    call = make_call(Shape(T=9, S=9, N=4, K=2), **arguments)
    exact = call.reference(reference.exact(np.float32), gradients=False)
    with jax.default_matmul_precision("float32"):
        theirs = jax.nn.dot_product_attention(**call.arrays, **call.options, implementation="xla")
    np.testing.assert_allclose(np.asarray(theirs), exact["output"], atol=3e-6)
