"""Random calls over the whole configuration space; each is made from its number alone.

`JAXFLASH_FUZZ=200` runs cases 0 to 199, `JAXFLASH_FUZZ=1000:1200` those. A failure has its number
in the test's name.
"""

import os

import jax
import numpy as np
import pytest

from calls import DIFFERENTIABLE, Call, Shape, bfloat16, compare, compiled, make_call, normal

DEFAULT_CASES = "40"
SIZES = (1, 2, 7, 16, 31, 63, 64, 65, 90, 127, 128, 129, 130, 150, 257)
HEAD_DIMS = (1, 3, 8, 16, 24, 40, 64, 72, 96, 128, 200, 256)
HEADS = ((1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (6, 2), (5, 1))
DTYPES = (np.float32, np.float32, np.float16, bfloat16())
EXAMPLES = 2


def case_numbers():
    first, _, last = os.environ.get("JAXFLASH_FUZZ", DEFAULT_CASES).rpartition(":")
    return range(int(first or 0), int(last))


def random_shape(rng):
    N, K = HEADS[rng.integers(len(HEADS))]
    H, Hv = rng.choice(HEAD_DIMS, 2)
    return Shape(
        B=None if rng.random() < 0.2 else int(rng.integers(1, 4)),
        T=int(rng.choice(SIZES)),
        S=int(rng.choice(SIZES)),
        N=N,
        K=K,
        H=int(H),
        Hv=int(Hv if rng.random() < 0.4 else H),
    )


def broadcastable(rng, shape):
    """`shape` with some axes replaced by 1."""
    return tuple(n if rng.random() < 0.6 else 1 for n in shape)


def floating(rng):
    return (np.float32, np.float16, bfloat16())[rng.integers(3)]


def a_bias(rng, shape):
    bias = normal(rng, broadcastable(rng, (*shape.batch, shape.N, shape.T, shape.S)), floating(rng))
    if rng.random() < 0.3:
        bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias).astype(bias.dtype)
    return {"bias": bias}


def a_mask(rng, shape):
    full = broadcastable(rng, (*shape.batch, shape.N, shape.T, shape.S))
    return {"mask": np.asarray(rng.random(full) < rng.choice([0.1, 0.5, 0.95]))}


def a_scale(rng, shape):
    scale = float(rng.choice([0.0, -0.3, 0.1, 0.5, 1.0]))
    return {"scale": np.asarray(scale, floating(rng)) if rng.random() < 0.6 else scale}


def query_lengths(rng, shape):
    return {"query_seq_lengths": np.asarray(rng.integers(-1, shape.T + 2, shape.batch), np.int32)}


def key_value_lengths(rng, shape):
    return {
        "key_value_seq_lengths": np.asarray(rng.integers(-1, shape.S + 2, shape.batch), np.int32)
    }


def causal(rng, shape):
    return {"is_causal": True}


def a_window(rng, shape):
    left, right = (None if rng.random() < 0.2 else int(x) for x in rng.integers(0, shape.S + 2, 2))
    if rng.random() < 0.2:
        return {"local_window_size": int(rng.integers(0, shape.S))}
    return {"local_window_size": (left, right)}


def an_offset(rng, shape):
    form = shape.batch if rng.random() < 0.7 else ()
    offset = np.asarray(rng.integers(-shape.T - 1, shape.S + 2, form), np.int32)
    return {"query_offset": offset, "is_causal": True}


def segments(rng, shape):
    count = int(rng.integers(1, 5))
    ids = [rng.integers(-count, count, (*shape.batch, n)) for n in (shape.T, shape.S)]
    if rng.random() < 0.7:
        ids = [np.sort(x, axis=-1) for x in ids]
    names = ("query_segment_ids", "key_value_segment_ids")
    return {n: x.astype(np.int32) for n, x in zip(names, ids, strict=True)}


def soft_cap(rng, shape):
    return {"logits_soft_cap": float(rng.choice([0.7, 5.0, 30.0]))}


def sinks(rng, shape):
    return {"sinks": normal(rng, shape.N, floating(rng))}


def dropout(rng, shape):
    rate = float(rng.choice([0.1, 0.5, 0.8]))
    return {"dropout_rate": rate, "dropout_key": jax.random.key(int(rng.integers(1000)))}


ARGUMENTS = (
    a_bias,
    a_mask,
    a_scale,
    query_lengths,
    key_value_lengths,
    causal,
    a_window,
    an_offset,
    segments,
    soft_cap,
    sinks,
    dropout,
)


def random_arguments(rng, shape):
    """None, one, some or all of the arguments."""
    count = rng.choice([1, 1, 2, 3, 4, 6, len(ARGUMENTS)])
    arguments = {}
    for make in rng.permutation(ARGUMENTS)[:count]:
        arguments |= make(rng, shape)
    return arguments


@pytest.mark.parametrize("number", case_numbers())
def test_case(implementation, number):
    rng = np.random.default_rng([2024, number])
    shape, dtype = random_shape(rng), DTYPES[rng.integers(len(DTYPES))]
    arguments = random_arguments(rng, shape)
    if rng.random() < 0.25:
        run_mapped(implementation, shape, dtype, arguments, rng)
    else:
        make_call(shape, dtype, number, **arguments).check(implementation)


def run_mapped(implementation, shape, dtype, arguments, rng):
    """A vmap over random operands: each example is a call of its own."""
    calls = [make_call(shape, dtype, seed, **arguments) for seed in range(EXAMPLES)]
    first = calls[0].arrays
    mapped = {n for n in first if rng.random() < 0.5} | {"query"}
    for call in calls[1:]:
        call.arrays |= {n: x for n, x in first.items() if n not in mapped}
    stacked = {
        n: jax.numpy.stack([c.arrays[n] for c in calls]) if n in mapped else x
        for n, x in first.items()
    }
    cotangents = jax.tree.map(lambda *c: np.stack(c), *(c.cotangents for c in calls))
    names = tuple(n for n in DIFFERENTIABLE if n in first)
    run = compiled(implementation, names, tuple(sorted(calls[0].options.items())))
    in_axes = ({n: 0 if n in mapped else None for n in first}, 0)
    results = jax.tree.map(np.asarray, jax.jit(jax.vmap(run, in_axes))(stacked, cotangents))
    for b, call in enumerate(calls):
        compare({n: x[b] for n, x in results.items()}, Call(call.arrays, call.options, call.seed))
