"""Sizes that fill a GPU: many tiles, blocks and heads. On a CPU they would take too long."""

import jax
import numpy as np
import pytest

from calls import DIFFERENTIABLE, Shape, bfloat16, compiled, make_call, normal

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="larger sizes are tested on GPUs only"
)

PADDED_DIMS = [32, 64, 96, 128, 192, 256]


def documents(rng):
    return np.sort(rng.integers(0, 6, (2, 700)), axis=1).astype(np.int32)


FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (130, 40), "query_offset": np.array(37)},
    "lengths": {
        "query_seq_lengths": np.array([650, 300]),
        "key_value_seq_lengths": np.array([129, 700]),
    },
    "window of lengths": {
        "local_window_size": (100, 37),
        "query_offset": np.array(-77),
        "query_seq_lengths": np.array([700, 391]),
        "key_value_seq_lengths": np.array([391, 650]),
    },
    "bias": {"bias": lambda rng: normal(rng, (1, 4, 700, 700))},
    "bias of the query's dtype": {"bias": lambda rng: normal(rng, (2, 4, 700, 700), bfloat16())},
    "mask": {"mask": lambda rng: rng.random((2, 1, 700, 700)) < 0.8},
    "documents": {
        "query_segment_ids": documents,
        "key_value_segment_ids": documents,
        "is_causal": True,
    },
    "soft cap": {"logits_soft_cap": 3.0},
    "sinks": {"sinks": lambda rng: normal(rng, (4,))},
    "dropout": {"dropout_rate": 0.2, "dropout_key": jax.random.key(3)},
}


@pytest.mark.parametrize("dtype", [bfloat16(), np.float32], ids=str)
@pytest.mark.parametrize("H", PADDED_DIMS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_head_dims(native, dtype, H, is_causal):
    shape = Shape(B=2, T=700, S=901, N=4, K=2, H=H)
    make_call(shape, dtype, is_causal=is_causal, query_offset=np.array(201)).check(native)


@pytest.mark.parametrize("dtype", [bfloat16(), np.float16, np.float32], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(native, dtype, feature):
    make_call(Shape(B=2, T=700, S=700, N=4, K=2, H=64), dtype, **FEATURES[feature]).check(native)


@pytest.mark.parametrize("feature", ["bias of the query's dtype", "mask", "documents", "dropout"])
@pytest.mark.parametrize("H", [128, 256])
def test_features_of_wide_heads(native, feature, H):
    shape = Shape(B=2, T=700, S=700, N=4, K=4, H=H)
    make_call(shape, bfloat16(), **FEATURES[feature]).check(native)


MANY = 80  # batches, whose tiles of keys are several for each multiprocessor
LENGTHS = {  # none at all among them
    "query_seq_lengths": np.arange(MANY) * 77 % 151,
    "key_value_seq_lengths": np.arange(MANY) * 59 % 201,
}
DOCUMENTS = np.arange(MANY * 200).reshape(MANY, 200) // 170
MANY_FEATURES = {
    "plain": {},
    "lengths": LENGTHS,
    "lengths, deterministic": LENGTHS | {"deterministic_gradients": True},
    "causal, deterministic": {"is_causal": True, "deterministic_gradients": True},
    "documents": {
        "query_segment_ids": DOCUMENTS[:, :150],
        "key_value_segment_ids": DOCUMENTS,
    },
    "mask": LENGTHS | {"mask": lambda rng: rng.random((1, 1, 150, 200)) < 0.5},
    "bias": LENGTHS | {"bias": lambda rng: normal(rng, (1, 4, 150, 200), bfloat16())},
    "dropout": {"dropout_rate": 0.2, "dropout_key": jax.random.key(3)},
}


@pytest.mark.parametrize("feature", MANY_FEATURES)
@pytest.mark.parametrize(("H", "K"), [(64, 4), (128, 4), (128, 2), (256, 4)])
def test_blocks_take_one_tile_after_the_other(native, feature, H, K):
    shape = Shape(B=MANY, T=150, S=200, N=4, K=K, H=H)
    make_call(shape, bfloat16(), **MANY_FEATURES[feature]).check(native)


@pytest.mark.parametrize("H", [64, 128])
def test_keys_past_lengths_are_cleared_in_the_right_tile(native, H):
    """Tiles of no or one tile of rows, of which a block may plan one while another's keys come."""
    lengths = {
        "query_seq_lengths": np.arange(MANY) % 3 * 20,
        "key_value_seq_lengths": np.arange(MANY) * 59 % 201,
    }
    call = make_call(Shape(B=MANY, T=40, S=200, N=4, K=4, H=H), bfloat16(), **lengths)
    for name in ("key", "value"):
        past = np.arange(200) >= lengths["key_value_seq_lengths"][:, None]
        call.arrays[name][past] = np.nan
    for _ in range(10):
        call.check(native)


@pytest.mark.parametrize("feature", ["causal", "window", "window of lengths", "documents"])
@pytest.mark.parametrize("H", [64, 128])
def test_thirty_runs_are_bitwise_equal(native, feature, H):
    """And right: where blocks take turns, each must know how many come before it."""
    call = make_call(
        Shape(B=2, T=700, S=700, N=4, K=2, H=H),
        bfloat16(),
        deterministic_gradients=True,
        **FEATURES[feature],
    )
    names = tuple(n for n in DIFFERENTIABLE if n in call.arrays)
    run = compiled(native, names, tuple(sorted(call.options.items())))
    first = jax.device_get(run(call.arrays, call.cotangents))
    for _ in range(29):
        for name, result in jax.device_get(run(call.arrays, call.cotangents)).items():
            assert result.tobytes() == first[name].tobytes(), name
    call.check(native)


@pytest.mark.parametrize("H", [64, 128])
def test_keys_that_no_query_sees_have_deterministic_gradients_of_zero(native, H):
    """Their blocks have nothing to compute, but take their turns."""
    mask = np.ones((1, 1, 1, 700), bool)
    mask[..., 64:390] = False
    call = make_call(
        Shape(B=2, T=700, S=700, N=2, H=H), bfloat16(), deterministic_gradients=True, mask=mask
    )
    for _ in range(10):
        call.check(native)
