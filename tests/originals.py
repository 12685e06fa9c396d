"""Compares a wrapper with the function or layer whose place it takes."""

import jax
import jax.numpy as jnp
import numpy as np

import tolerance


def compare(wrapper, original, exact, arrays, *, same_dtype=True):
    """Output and gradients of the wrapper: as near to the exact ones as the original's.

    Args:
        wrapper: function of `arrays`, jitted here, that returns an array or several.
        original: what it takes the place of.
        exact: what is right, run on float64 numbers.
        arrays: tree of floating arrays; gradients with respect to all of them are compared.
        same_dtype: whether the dtypes of the original's results are expected.

    The limit is twice the original's error plus noise of about an ulp; see `tolerance`. A gradient
    whose terms cancel, as that of a key's bias, has terms of the size of the others, and cancels up
    to the rounding of the output, from which flash attention computes it.
    """
    got, working = results(wrapper, arrays), results(original, arrays)
    with jax.enable_x64(True):
        right = results(exact, jax.tree.map(lambda x: np.asarray(x, np.float64), arrays))
    largest = max(np.abs(x).max(initial=0) for x in jax.tree.leaves(right))
    flat, structure = jax.tree.flatten_with_path(right)
    assert structure == jax.tree.structure(got) == jax.tree.structure(working)
    for (path, expected), mine, theirs in zip(
        flat, jax.tree.leaves(got), jax.tree.leaves(working), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if same_dtype:
            assert mine.dtype == theirs.dtype, f"{name} is {mine.dtype}, not {theirs.dtype}"
        cancels = np.abs(expected).max(initial=0) < 1e-12 * largest
        measure = tolerance.Yardstick(
            exact=expected,
            working=[theirs],
            magnitude=largest,
            storage=mine.dtype,
            compute=mine.dtype if cancels else np.dtype(np.float32),
        )
        tolerance.assert_close(name, mine, measure)


def results(function, arrays):
    """Results of a function and gradients of all arrays, for one random cotangent at all dtypes."""

    @jax.jit
    def run(arrays):
        outputs, pull = jax.vjp(function, arrays)
        return outputs, pull(jax.tree.map(cotangent, outputs))[0]

    def cotangent(x):
        numbers = np.random.default_rng(x.shape).standard_normal(x.shape)
        return jnp.asarray(numbers.astype(jnp.bfloat16), x.dtype)

    return jax.tree.map(np.asarray, run(arrays))


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
