"""The custom calls check what they get: called directly, with one thing wrong at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

B, T, S, N, K, H, HV = 2, 3, 5, 4, 2, 8, 6
ABSENT = jnp.zeros(0, jnp.uint8)
NO_RESULT = jax.ShapeDtypeStruct((0,), jnp.uint8)


def f32(*shape):
    return jnp.zeros(shape, jnp.float32)


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


def forward(arrays, output=jnp.float32, **changed):
    shape = jax.ShapeDtypeStruct
    results = [shape((B, T, N, HV), output), *[shape((B, T, N), jnp.float32)] * 2]
    call = jax.ffi.ffi_call("jaxflash_forward", results)
    return jax.block_until_ready(call(*arrays, **attributes(**changed)))


def test_what_is_right_passes(native):
    assert forward(operands())[0].shape == (B, T, N, HV)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": f32(B, T, N, H).astype(jnp.int32)}, "query of shape"),
        ({"key": f32(B, S, K, H).astype(jnp.bfloat16)}, "key of shape"),
        ({"key": f32(B, S, K, H + 1)}, "expected 8 for axis H"),
        ({"value": f32(B, S + 1, K, HV)}, "expected 5 for axis S"),
        ({"value": f32(B + 1, S, K, HV)}, "expected 1 or 2 for batch dim 0"),
        ({"value": f32(S, K, HV)}, "expected equal numbers"),
        ({"value": ABSENT}, "expected equal numbers"),
        ({"bias": f32(B, N, T, S).astype(jnp.int32)}, "bias of shape"),
        ({"bias": f32(B, N, T, 2)}, "expected 5 for axis s"),
        ({"mask": f32(B, N, T, S)}, "mask of shape"),
        ({"sinks": f32(1, N).astype(jnp.bfloat16)}, "sinks of shape"),
        ({"scale": f32(1).astype(jnp.float16)}, "scale of shape"),
        ({"query_lengths": f32(B)}, "query_lengths of shape"),
        ({"key_value_lengths": f32(B).astype(jnp.int16)}, "key_value_lengths of shape"),
        ({"query_offset": f32(B).astype(bool)}, "query_offset of shape"),
        ({"query_segment_ids": jnp.zeros((B, T), jnp.int32)}, "segment ids of only one side"),
        ({"dropout_stream": jnp.zeros((B, N, 4), jnp.int32)}, "dropout_stream of shape"),
        ({"dropout_stream": jnp.zeros((B, N, 3), jnp.uint32)}, "expected 4 for axis 4"),
    ],
)
def test_wrong_operands_are_refused(native, changed, message):
    with pytest.raises(Exception, match=message):
        forward(operands(**changed))


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
def test_wrong_attributes_are_refused(native, changed, message):
    with pytest.raises(Exception, match=message):
        forward(operands(), **changed)


def test_wrong_results_are_refused(native):
    with pytest.raises(Exception, match="output of shape"):
        forward(operands(), output=jnp.int32)


def backward(cotangents, arrays=None):
    """Calls the backward handler for six results."""
    arrays = operands() if arrays is None else arrays
    statistics = [f32(B, T, N)] * 3
    call = jax.ffi.ffi_call("jaxflash_backward", cotangents)
    inputs = [*arrays, f32(B, T, N, HV), *statistics]
    return jax.block_until_ready(call(*inputs, **attributes()))


def test_cotangents_summed_over_differing_operands_are_refused(native):
    summed = jax.ShapeDtypeStruct((1, S, K, H), jnp.float32)
    with pytest.raises(Exception, match="is summed over"):
        backward([NO_RESULT, summed, *[NO_RESULT] * 4], operands(key=f32(1, S, K, H)))


def test_a_query_cotangent_of_16_bits_needs_a_workspace(native):
    half = [x.astype(jnp.bfloat16) if x.ndim == 4 else x for x in operands()]
    query = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    statistics = [f32(B, T, N)] * 3
    call = jax.ffi.ffi_call("jaxflash_backward", [query, *[NO_RESULT] * 5])
    with pytest.raises(Exception, match="needs a workspace"):
        jax.block_until_ready(
            call(*half, f32(B, T, N, HV).astype(jnp.bfloat16), *statistics, **attributes())
        )
