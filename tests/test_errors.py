"""Wrong calls: each raises while tracing and names the argument, the expected and the given."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash import flash_attention

B, T, S, N, K, H, HV = 2, 5, 6, 4, 2, 8, 3
RIGHT = {
    "query": np.zeros((B, T, N, H), np.float32),
    "key": np.zeros((B, S, K, H), np.float32),
    "value": np.zeros((B, S, K, HV), np.float32),
}
UNBATCHED = {name: array[0] for name, array in RIGHT.items()}
KEY = jax.random.key(0)


def f32(*shape):
    return np.zeros(shape, np.float32)


def i32(*shape):
    return np.zeros(shape, np.int32)


def half(*shape):
    return np.zeros(shape, np.float16)


IDS = {"query_segment_ids": i32(B, T), "key_value_segment_ids": i32(B, S)}

# (argument, what is passed, exception, what the message expects, what it got)
WRONG_CALLS = [
    # query
    ("query", {"query": None}, TypeError, "array", "None"),
    ("query", {"query": object()}, TypeError, "array", "object"),
    ("query", {"query": [[1.0], [1.0, 2.0]]}, TypeError, "array", "list"),
    ("query", {"query": i32(B, T, N, H)}, TypeError, "bfloat16, float16, float32", "int32"),
    ("query", {"query": np.zeros((B, T, N, H), bool)}, TypeError, "float32", "bool"),
    ("query", {"query": np.zeros((B, T, N, H), np.complex64)}, TypeError, "float32", "complex64"),
    (
        "query",
        {"query": jnp.zeros((B, T, N, H), "float8_e5m2")},
        TypeError,
        "float16",
        "float8_e5m2",
    ),
    (
        "query",
        {"query": f32(T, H)},
        ValueError,
        r"4 axes \[B, T, N, H\].*3 axes",
        r"2 axes.*\(5, 8\)",
    ),
    ("query", {"query": f32(1, B, T, N, H)}, ValueError, "4 axes", r"5 axes.*\(1, 2, 5, 4, 8\)"),
    ("query", {"query": f32()}, ValueError, "4 axes", "0 axes"),
    ("query", {"query": f32(B, T, 3, H)}, ValueError, "multiple of the 2", r"3, .*\(2, 5, 3, 8\)"),
    ("query", {"query": f32(B, T, 0, H)}, ValueError, "at least 1 head", "0"),
    ("query", {"query": f32(B, T, N, 0)}, ValueError, "head dim.*1 to 256", "0"),
    ("query", {"query": f32(B, T, N, 257)}, ValueError, "head dim.*1 to 256", "257"),
    (
        "query",
        {n: x[:, :, :, :1].repeat(300, 3) for n, x in RIGHT.items()},
        ValueError,
        "256",
        "300",
    ),
    # key
    ("key", {"key": None}, TypeError, "array", "None"),
    ("key", {"key": half(B, S, K, H)}, TypeError, "float32", "float16"),
    ("key", {"key": i32(B, S, K, H)}, TypeError, "float32", "int32"),
    ("key", {"key": f32(S, K, H)}, ValueError, "4 axes", r"3 axes.*\(6, 2, 8\)"),
    ("key", {"key": f32(3, S, K, H)}, ValueError, "batch size 2", "3"),
    ("key", {"key": f32(1, S, K, H)}, ValueError, "batch size 2", "1"),
    ("key", {"key": f32(B, S, K, 7)}, ValueError, "head dim 8", "7"),
    ("key", {"key": f32(B, S, 0, H)}, ValueError, "at least 1 head", "0"),
    # value
    ("value", {"value": None}, TypeError, "array", "None"),
    ("value", {"value": half(B, S, K, HV)}, TypeError, "float32", "float16"),
    ("value", {"value": f32(B, S, K)}, ValueError, "4 axes", "3 axes"),
    ("value", {"value": f32(1, S, K, HV)}, ValueError, "batch size 2", "1"),
    ("value", {"value": f32(B, 7, K, HV)}, ValueError, r"\(6, 2\)", r"\(7, 2\)"),
    ("value", {"value": f32(B, S, 1, HV)}, ValueError, r"\(6, 2\)", r"\(6, 1\)"),
    ("value", {"value": f32(B, S, K, 0)}, ValueError, "1 to 256", "0"),
    ("value", {"value": f32(B, S, K, 257)}, ValueError, "1 to 256", "257"),
    # bias
    ("bias", {"bias": i32(B, N, T, S)}, TypeError, "floating", "int32"),
    ("bias", {"bias": np.ones((B, N, T, S), bool)}, TypeError, "floating", "bool.*mask"),
    ("bias", {"bias": f32(T, S)}, ValueError, r"4 axes.*\(2, 4, 5, 6\)", r"2 axes.*\(5, 6\)"),
    ("bias", {"bias": f32(N, T, S)}, ValueError, "4 axes", "3 axes"),
    ("bias", {"bias": f32(B, K, T, S)}, ValueError, r"\(2, 4, 5, 6\)", r"\(2, 2, 5, 6\)"),
    ("bias", {"bias": f32(B, N, S, T)}, ValueError, r"\(2, 4, 5, 6\)", r"\(2, 4, 6, 5\)"),
    ("bias", {"bias": f32(B, N, T, 0)}, ValueError, r"\(2, 4, 5, 6\)", r"\(2, 4, 5, 0\)"),
    ("bias", {"bias": object()}, TypeError, "array", "object"),
    ("bias", {**UNBATCHED, "bias": f32(1, N, T, S)}, ValueError, r"3 axes.*\(4, 5, 6\)", "4 axes"),
    # mask
    ("mask", {"mask": i32(B, N, T, S)}, TypeError, "bool", "int32"),
    ("mask", {"mask": f32(B, N, T, S)}, TypeError, "bool", "float32.*bias"),
    ("mask", {"mask": np.ones((T, S), bool)}, ValueError, "4 axes", "2 axes"),
    (
        "mask",
        {"mask": np.ones((B, N, T, 7), bool)},
        ValueError,
        r"\(2, 4, 5, 6\)",
        r"\(2, 4, 5, 7\)",
    ),
    (
        "mask",
        {"mask": np.ones((3, 1, 1, S), bool)},
        ValueError,
        r"\(2, 4, 5, 6\)",
        r"\(3, 1, 1, 6\)",
    ),
    ("mask", {**UNBATCHED, "mask": np.ones((T, S), bool)}, ValueError, "3 axes", "2 axes"),
    # scale
    ("scale", {"scale": "0.1"}, TypeError, "real scalar", "str '0.1'"),
    ("scale", {"scale": 1j}, TypeError, "real scalar", "complex"),
    ("scale", {"scale": True}, TypeError, "real scalar", "bool"),
    ("scale", {"scale": f32(1)}, ValueError, "scalar", r"\(1,\)"),
    ("scale", {"scale": f32(B)}, ValueError, "scalar", r"\(2,\)"),
    # flags
    ("is_causal", {"is_causal": 1}, TypeError, "True or False", "int 1"),
    ("is_causal", {"is_causal": None}, TypeError, "True or False", "None"),
    ("is_causal", {"is_causal": jnp.asarray(True)}, TypeError, "True or False", "array.*bool"),
    ("return_residual", {"return_residual": "yes"}, TypeError, "True or False", "str 'yes'"),
    (
        "deterministic_gradients",
        {"deterministic_gradients": 0},
        TypeError,
        "True or False",
        "int 0",
    ),
    # lengths
    ("query_seq_lengths", {"query_seq_lengths": f32(B)}, TypeError, "integer", "float32"),
    ("query_seq_lengths", {"query_seq_lengths": np.ones(B, bool)}, TypeError, "integer", "bool"),
    ("query_seq_lengths", {"query_seq_lengths": 3}, ValueError, r"\[B\] = \(2,\)", r"\(\)"),
    ("query_seq_lengths", {"query_seq_lengths": i32(3)}, ValueError, r"\(2,\)", r"\(3,\)"),
    ("query_seq_lengths", {"query_seq_lengths": i32(B, 1)}, ValueError, r"\(2,\)", r"\(2, 1\)"),
    (
        "query_seq_lengths",
        {**UNBATCHED, "query_seq_lengths": i32(1)},
        ValueError,
        r"\(\)",
        r"\(1,\)",
    ),
    ("query_seq_lengths", {"query_seq_lengths": "3"}, TypeError, "integer", "str|<U1"),
    ("key_value_seq_lengths", {"key_value_seq_lengths": f32(B)}, TypeError, "integer", "float32"),
    ("key_value_seq_lengths", {"key_value_seq_lengths": i32()}, ValueError, r"\(2,\)", r"\(\)"),
    ("key_value_seq_lengths", {"key_value_seq_lengths": i32(1)}, ValueError, r"\(2,\)", r"\(1,\)"),
    ("key_value_seq_lengths", {"key_value_seq_lengths": [2.0, 3.0]}, TypeError, "integer", "float"),
    # window
    ("local_window_size", {"local_window_size": -1}, ValueError, ">= 0", "-1"),
    ("local_window_size", {"local_window_size": (-1, 2)}, ValueError, ">= 0", r"\(-1, 2\)"),
    ("local_window_size", {"local_window_size": (2, -3)}, ValueError, ">= 0", r"\(2, -3\)"),
    ("local_window_size", {"local_window_size": (1, 2, 3)}, ValueError, r"\(left, right\)", "3"),
    ("local_window_size", {"local_window_size": ()}, ValueError, r"\(left, right\)", "0"),
    ("local_window_size", {"local_window_size": 1.5}, TypeError, "int", "float 1.5"),
    ("local_window_size", {"local_window_size": (1, 2.0)}, TypeError, "int", r"\(1, 2.0\)"),
    ("local_window_size", {"local_window_size": "3"}, TypeError, "int", "str '3'"),
    ("local_window_size", {"local_window_size": True}, TypeError, "int", "bool True"),
    ("local_window_size", {"local_window_size": jnp.asarray(3)}, TypeError, "static int", "array"),
    # offset
    ("query_offset", {"query_offset": 1.0}, TypeError, "integer", "float"),
    ("query_offset", {"query_offset": True}, TypeError, "integer", "bool"),
    ("query_offset", {"query_offset": i32(3)}, ValueError, r"\(2,\)", r"\(3,\)"),
    ("query_offset", {"query_offset": i32(B, 1)}, ValueError, r"\(2,\)", r"\(2, 1\)"),
    ("query_offset", {**UNBATCHED, "query_offset": i32(1)}, ValueError, r"\(\)", r"\(1,\)"),
    # segment ids
    ("key_value_segment_ids", {"query_segment_ids": i32(B, T)}, ValueError, "together", "None"),
    ("query_segment_ids", {"key_value_segment_ids": i32(B, S)}, ValueError, "together", "None"),
    ("query_segment_ids", {**IDS, "query_segment_ids": f32(B, T)}, TypeError, "integer", "float32"),
    (
        "query_segment_ids",
        {**IDS, "query_segment_ids": i32(B, S)},
        ValueError,
        r"\(2, 5\)",
        r"\(2, 6\)",
    ),
    ("query_segment_ids", {**IDS, "query_segment_ids": i32(T)}, ValueError, r"\[B, T\]", r"\(5,\)"),
    ("query_segment_ids", {**UNBATCHED, **IDS}, ValueError, r"\(5,\)", r"\(2, 5\)"),
    (
        "key_value_segment_ids",
        {**IDS, "key_value_segment_ids": f32(B, S)},
        TypeError,
        "integer",
        "float32",
    ),
    (
        "key_value_segment_ids",
        {**IDS, "key_value_segment_ids": i32(B, T)},
        ValueError,
        r"\(2, 6\)",
        r"\(2, 5\)",
    ),
    (
        "key_value_segment_ids",
        {**IDS, "key_value_segment_ids": i32(1, S)},
        ValueError,
        r"\(2, 6\)",
        r"\(1, 6\)",
    ),
    # soft cap
    ("logits_soft_cap", {"logits_soft_cap": 0.0}, ValueError, "> 0", "0.0"),
    ("logits_soft_cap", {"logits_soft_cap": -2}, ValueError, "> 0", "-2"),
    ("logits_soft_cap", {"logits_soft_cap": float("nan")}, ValueError, "> 0", "nan"),
    ("logits_soft_cap", {"logits_soft_cap": float("inf")}, ValueError, "finite", "inf"),
    ("logits_soft_cap", {"logits_soft_cap": "30"}, TypeError, "number", "str '30'"),
    ("logits_soft_cap", {"logits_soft_cap": f32(1)}, TypeError, "number", r"\(1,\)"),
    ("logits_soft_cap", {"logits_soft_cap": jnp.asarray(3.0)}, TypeError, "static", "array"),
    # sinks
    ("sinks", {"sinks": i32(N)}, TypeError, "floating", "int32"),
    ("sinks", {"sinks": f32(K)}, ValueError, r"\[N\] = \(4,\)", r"\(2,\)"),
    ("sinks", {"sinks": f32(B, N)}, ValueError, r"\(4,\)", r"\(2, 4\)"),
    ("sinks", {"sinks": 0.5}, ValueError, r"\(4,\)", r"\(\)"),
    # dropout
    ("dropout_rate", {"dropout_rate": 1.0, "dropout_key": KEY}, ValueError, r"\[0, 1\)", "1.0"),
    ("dropout_rate", {"dropout_rate": -0.1, "dropout_key": KEY}, ValueError, r"\[0, 1\)", "-0.1"),
    (
        "dropout_rate",
        {"dropout_rate": float("nan"), "dropout_key": KEY},
        ValueError,
        r"\[0, 1\)",
        "nan",
    ),
    ("dropout_rate", {"dropout_rate": "0.1", "dropout_key": KEY}, TypeError, "number", "str '0.1'"),
    ("dropout_rate", {"dropout_rate": None}, TypeError, "number", "None"),
    (
        "dropout_rate",
        {"dropout_rate": jnp.asarray(0.1), "dropout_key": KEY},
        TypeError,
        "static",
        "array",
    ),
    ("dropout_key", {"dropout_rate": 0.1}, ValueError, "PRNG key.*0.1", "None"),
    ("dropout_key", {"dropout_rate": 0.1, "dropout_key": 3}, TypeError, "PRNG key", "int 3"),
    ("dropout_key", {"dropout_rate": 0.1, "dropout_key": f32(2)}, TypeError, "PRNG key", "float32"),
    (
        "dropout_key",
        {"dropout_rate": 0.1, "dropout_key": jax.random.split(KEY, 3)},
        ValueError,
        "one key",
        r"\(3,\)",
    ),
    (
        "dropout_key",
        {"dropout_rate": 0.1, "dropout_key": np.zeros(3, np.uint32)},
        ValueError,
        r"\(2,\)",
        r"\(3,\)",
    ),
    # implementation
    ("implementation", {"implementation": "cudnn"}, ValueError, '"native" or "xla"', "'cudnn'"),
    ("implementation", {"implementation": 1}, ValueError, '"native" or "xla"', "1"),
]


def test_there_are_enough_and_every_argument_is_there():
    assert len(WRONG_CALLS) >= 60
    names = set(flash_attention.__kwdefaults__) | {"query", "key", "value", "bias", "mask"}
    assert {row[0] for row in WRONG_CALLS} == names


@pytest.mark.parametrize(
    ("argument", "changes", "exception", "expected", "got"),
    WRONG_CALLS,
    ids=[f"{n}-{row[0]}" for n, row in enumerate(WRONG_CALLS)],
)
def test_wrong_call(argument, changes, exception, expected, got):
    pattern = rf"(?s)^{argument}: expected .*{expected}.*, got .*{got}"
    with pytest.raises(exception, match=pattern) as caught:
        flash_attention(**{**RIGHT, "implementation": "xla", **changes})
    assert type(caught.value) is exception


@pytest.mark.parametrize("argument", ["key", "mask", "query_segment_ids", "sinks"])
def test_errors_come_while_tracing(argument):
    """Inside jit, grad and vmap the same messages; nothing has been compiled by then."""
    row = next(r for r in WRONG_CALLS if r[0] == argument and r[2] is ValueError)
    arrays = {**RIGHT, **row[1]}
    call = functools.partial(flash_attention, implementation="xla")
    with pytest.raises(ValueError, match=argument):
        jax.eval_shape(lambda a: call(**a), arrays)
    with pytest.raises(ValueError, match=argument):
        jax.jit(lambda a: call(**a))(arrays)
    with pytest.raises(ValueError, match=argument):
        jax.grad(lambda q: call(**{**arrays, "query": q}).sum())(arrays["query"])


def test_positional_arguments_end_with_the_mask():
    with pytest.raises(TypeError, match="positional"):
        flash_attention(*RIGHT.values(), None, None, 0.5)


def test_unknown_argument():
    with pytest.raises(TypeError, match="causal"):
        flash_attention(**RIGHT, causal=True)


@pytest.mark.parametrize(
    "name", ["is_causal", "dropout_rate", "logits_soft_cap", "local_window_size"]
)
def test_static_arguments_may_not_be_traced(name):
    value = {
        "is_causal": True,
        "dropout_rate": 0.5,
        "logits_soft_cap": 2.0,
        "local_window_size": 3,
    }[name]
    key = {"dropout_key": KEY} if name == "dropout_rate" else {}
    with pytest.raises(TypeError, match=rf"^{name}: expected .*got a traced array"):
        jax.jit(lambda x: flash_attention(**RIGHT, **{name: x}, **key))(value)


def test_shapes_in_the_message_can_be_acted_on():
    """Exchanged axes: the message says which layout is meant."""
    with pytest.raises(ValueError, match=re.escape("[B, T, N, H]")):
        flash_attention(f32(1, 4, 48, 64), f32(1, 4, 32, 64), f32(1, 4, 32, 64))
