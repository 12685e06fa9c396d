"""Compares a wrapper with the function or layer whose place it takes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import tolerance


def compare(wrapper, original, exact, arrays):
    """Output and gradients of the wrapper: near the exact ones as the original is, in its dtypes.

    Args:
        wrapper: function of `arrays`, jitted here, that returns an array or several.
        original: what it takes the place of.
        exact: what is right, run on float64 numbers.
        arrays: tree of floating arrays; gradients with respect to all of them are compared.

    The limit is twice the original's error plus noise of about an ulp; see `tolerance`. The error
    is also measured with float32 numbers an ulp off: what another order of the same sums does.
    """
    run = results(original)
    working = [run(arrays), *(run(jax.tree.map(partial(_an_ulp_off, s), arrays)) for s in (0, 1))]
    with jax.enable_x64(True):
        right = results(exact)(jax.tree.map(lambda x: np.asarray(x, np.float64), arrays))
    assert_as_accurate(results(wrapper)(arrays), working, right)


def assert_as_accurate(got, working, right):
    """Compares trees of results; `working` are several of the original's. See `compare`.

    The terms of some gradients cancel, as those of a key's bias. In flash attention they do so up
    to the rounding of the output; there the limit is made from the error of all results.
    """
    flat, structure = jax.tree.flatten_with_path(right)
    assert structure == jax.tree.structure(got) == jax.tree.structure(working[0])
    measures = [
        tolerance.Yardstick(
            exact=expected,
            working=theirs,
            magnitude=np.abs(expected).max(initial=0),
            storage=theirs[0].dtype,
            compute=np.dtype(np.float32),
        )
        for (_, expected), *theirs in zip(flat, *map(jax.tree.leaves, working), strict=True)
    ]
    largest = max(m.magnitude for m in measures)
    overall = max(m.working_error for m in measures)
    for (path, _), mine, measure in zip(flat, jax.tree.leaves(got), measures, strict=True):
        name = jax.tree_util.keystr(path)
        assert mine.dtype == measure.storage, f"{name} is {mine.dtype}, not {measure.storage}"
        if measure.magnitude < 1e-12 * largest:
            measure = dataclasses.replace(measure, magnitude=largest, spread=overall / 2)
        tolerance.assert_close(name, mine, measure)


def assert_equal_but_rounding(got, expected, dtype=np.float32):
    """Compares results of two programs for the same numbers: a few ulps of the largest differ."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    noise = 8 * tolerance.wobble(np.abs(expected).max(initial=0), dtype)
    np.testing.assert_allclose(got, expected, rtol=0, atol=noise)


def _an_ulp_off(seed, x):
    if x.dtype != np.float32:
        return x
    up = np.random.default_rng([seed, x.size]).random(x.shape) < 0.5
    return np.nextafter(x, np.where(up, np.inf, -np.inf).astype(np.float32))


def results(function):
    """A function's results with gradients of all arrays, for one random cotangent at all dtypes."""

    @jax.jit
    def run(arrays):
        outputs, pull = jax.vjp(function, arrays)
        return outputs, pull(jax.tree.map(cotangent, outputs))[0]

    def cotangent(x):
        numbers = np.random.default_rng(x.shape).standard_normal(x.shape)
        return jnp.asarray(numbers.astype(jnp.bfloat16), x.dtype)

    return lambda arrays: jax.tree.map(np.asarray, run(arrays))


def attention(query, key, value, bias=None, *, visible, scale=None):
    """Dense attention of `[*B, T, N, H]`, `[*B, S, K, H]`, with its log-sum-exp `[*B, T, N]`.

    `visible`: bool, broadcastable to `[*B, N, T, S]`; every row has a True.
    """
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * jnp.einsum("...tnh,...snh->...nts", query, key)
    logits = jnp.where(visible, logits if bias is None else logits + bias, -jnp.inf)
    output = jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(logits), value)
    return output, jnp.swapaxes(jax.nn.logsumexp(logits, axis=-1), -1, -2)
