"""The custom calls check what they get: called directly, with one thing wrong at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

B, T, S, N, K, H, HV = 2, 3, 5, 4, 2, 8, 6
ABSENT = np.zeros(0, np.uint8)
NO_RESULT = jax.ShapeDtypeStruct((0,), np.uint8)
ENOUGH = jax.ShapeDtypeStruct((2**20,), np.uint8)

# What the calls of a platform have besides: attributes, and the workspace as the last result.
FORWARD_ONLY = {
    "cpu": ({}, []),
    "cuda": ({"precision": np.int64(0)}, [ENOUGH]),
}
BACKWARD_ONLY = {
    "cpu": ({}, [NO_RESULT]),
    "cuda": ({"precision": np.int64(0), "deterministic": np.int64(0)}, [ENOUGH]),
}


def f32(*shape):
    return np.zeros(shape, np.float32)


def half(*shape):
    return np.zeros(shape, jnp.bfloat16)


def operands(**changed):
    """The 13 operands by name, absent ones as the empty array of bytes."""
    given = {
        "query": f32(B, T, N, H),
        "key": f32(B, S, K, H),
        "value": f32(B, S, K, HV),
        "bias": ABSENT,
        "mask": ABSENT,
        "sinks": ABSENT,
        "scale": f32(1),
        "query_lengths": ABSENT,
        "key_value_lengths": ABSENT,
        "query_offset": ABSENT,
        "query_segment_ids": ABSENT,
        "key_value_segment_ids": ABSENT,
        "dropout_stream": ABSENT,
    }
    assert not set(changed) - set(given)
    return list((given | changed).values())


def attributes(**changed):
    given = {
        "window_left": np.int64(-1),
        "window_right": np.int64(-1),
        "soft_cap": np.float64(0),
        "dropout_threshold": np.int64(0),
    }
    return given | changed


def forward(platform, arrays, output=np.float32, **changed):
    shape = jax.ShapeDtypeStruct
    extra, workspace = FORWARD_ONLY[platform]
    results = [shape((B, T, N, HV), output), *[shape((B, T, N), np.float32)] * 2, *workspace]
    call = jax.ffi.ffi_call("jaxflash_forward", results)
    return jax.block_until_ready(call(*arrays, **attributes(**extra | changed)))


def backward(platform, cotangents, arrays, output_cotangent, **changed):
    """Calls the backward handler for the five cotangents and the workspace."""
    extra, workspace = BACKWARD_ONLY[platform]
    results = cotangents if len(cotangents) == 6 else [*cotangents, *workspace]
    call = jax.ffi.ffi_call("jaxflash_backward", results)
    inputs = [*arrays, output_cotangent, *[f32(B, T, N)] * 3]
    return jax.block_until_ready(call(*inputs, **attributes(**extra | changed)))


def test_what_is_right_passes(platform):
    assert forward(platform, operands())[0].shape == (B, T, N, HV)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": np.zeros((B, T, N, H), np.int32)}, "query of shape"),
        ({"key": half(B, S, K, H)}, "key of shape"),
        ({"key": f32(B, S, K, H + 1)}, "expected 8 for axis H"),
        ({"value": f32(B, S + 1, K, HV)}, "expected 5 for axis S"),
        ({"value": f32(B + 1, S, K, HV)}, "expected 1 or 2 for batch dim 0"),
        ({"value": f32(S, K, HV)}, "expected equal numbers"),
        ({"value": ABSENT}, "expected equal numbers"),
        ({"bias": np.zeros((B, N, T, S), np.int32)}, "bias of shape"),
        ({"bias": f32(B, N, T, 2)}, "expected 5 for axis s"),
        ({"mask": f32(B, N, T, S)}, "mask of shape"),
        ({"sinks": half(1, N)}, "sinks of shape"),
        ({"scale": np.zeros(1, np.float16)}, "scale of shape"),
        ({"query_lengths": f32(B)}, "query_lengths of shape"),
        ({"key_value_lengths": np.zeros(B, np.int16)}, "key_value_lengths of shape"),
        ({"query_offset": np.zeros(B, bool)}, "query_offset of shape"),
        ({"query_segment_ids": np.zeros((B, T), np.int32)}, "segment ids of only one side"),
        ({"dropout_stream": np.zeros((B, N, 4), np.int32)}, "dropout_stream of shape"),
        ({"dropout_stream": np.zeros((B, N, 3), np.uint32)}, "expected 4 for axis 4"),
    ],
)
def test_wrong_operands_are_refused(platform, changed, message):
    with pytest.raises(Exception, match=message):
        forward(platform, operands(**changed))


@pytest.mark.parametrize("array", [ABSENT, f32(B, T, N, H)], ids=["absent", "alike"])
def test_nonsense_is_refused(platform, array):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"jaxflash.*\d"):
        forward(platform, [array] * 13)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window_left": np.int64(-2)}, "window -2, -1"),
        ({"window_right": np.int64(2**63 - 1)}, "expected -1 to"),
        ({"soft_cap": np.float64(-1)}, "soft_cap"),
        ({"soft_cap": np.float64(np.inf)}, "soft_cap"),
        ({"dropout_threshold": np.int64(65536)}, "dropout_threshold 65536"),
        ({"dropout_threshold": np.int64(6553)}, "dropout without a dropout_stream"),
    ],
)
def test_wrong_attributes_are_refused(platform, changed, message):
    with pytest.raises(Exception, match=message):
        forward(platform, operands(), **changed)


def test_wrong_results_are_refused(platform):
    with pytest.raises(Exception, match="output of shape"):
        forward(platform, operands(), output=np.int32)


def test_cotangents_summed_over_differing_operands_are_refused(platform):
    summed = jax.ShapeDtypeStruct((1, S, K, H), np.float32)
    arrays = operands(key=f32(1, S, K, H))
    with pytest.raises(Exception, match="is summed over"):
        backward(platform, [NO_RESULT, summed, *[NO_RESULT] * 3], arrays, f32(B, T, N, HV))


def test_a_query_cotangent_of_16_bits_needs_a_workspace(platform):
    """The mask's map would be the first thing to be written there."""
    arrays = operands(mask=np.ones((B, 1, T, S), bool))
    arrays = [x.astype(jnp.bfloat16) if x.ndim == 4 and x.dtype != bool else x for x in arrays]
    query = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    with pytest.raises(Exception, match=r"needs a workspace|workspace is too small"):
        backward(platform, [query, *[NO_RESULT] * 5], arrays, half(B, T, N, HV))
