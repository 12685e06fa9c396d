"""Dropout: the mask is a pure function of (key, batch, head, query, key position)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from calls import Shape, assert_same, bfloat16, make_call
from jaxflash import flash_attention


def kept(implementation, shape, rate, rng_key, **arguments):
    """Factors `[B,N,T,S]` by which an implementation multiplies the probabilities.

    With q=0 each is 1/S before dropout; one-hot values make the output the probabilities.
    """
    batch, heads, queries, keys = shape
    q, k = (jnp.zeros((batch, n, heads, 4)) for n in (queries, keys))
    v = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (batch, keys, heads, keys))
    output = flash_attention(
        q, k, v, dropout_rate=rate, dropout_key=rng_key, implementation=implementation, **arguments
    )
    return np.asarray(output).transpose(0, 2, 1, 3) * keys


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1 / 65536, 0.99999])
def test_bits_are_the_documented_ones(implementation, rate):
    """Bit for bit the reference's Philox, over tile borders in both directions."""
    rng_key = jax.random.key(11)
    shape = (2, 3, 70, 140)
    expected = reference.dropout_factors(rng_key, rate, *shape)
    np.testing.assert_allclose(kept(implementation, shape, rate, rng_key), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["typed", "raw", "rbg"])
def test_kinds_of_keys(implementation, kind):
    rng_key = {
        "typed": lambda: jax.random.key(3),
        "raw": lambda: jax.random.PRNGKey(3),
        "rbg": lambda: jax.random.key(3, impl="rbg"),
    }[kind]()
    expected = reference.dropout_factors(rng_key, 0.5, 1, 1, 9, 21)
    np.testing.assert_allclose(
        kept(implementation, (1, 1, 9, 21), 0.5, rng_key), expected, rtol=1e-5
    )


def test_rate_and_independence(implementation):
    """The share dropped is the rate; keys, batch entries and heads don't resemble each other."""
    rate, count = 0.3, 64 * 128
    masks = [kept(implementation, (2, 2, 64, 128), rate, jax.random.key(s)) > 0 for s in (0, 1)]
    planes = np.concatenate([m.reshape(4, count) for m in masks])
    spread = np.sqrt(rate * (1 - rate) / count)
    assert (np.abs(1 - planes.mean(1) - rate) < 5 * spread).all()
    correlation = np.corrcoef(planes)
    assert np.abs(correlation[~np.eye(8, dtype=bool)]).max() < 5 / np.sqrt(count)
    rows = np.corrcoef(planes[0].reshape(64, 128))
    assert np.abs(rows[~np.eye(64, dtype=bool)]).max() < 6 / np.sqrt(128)


def test_mean_is_kept(implementation):
    factors = kept(implementation, (1, 4, 64, 128), 0.4, jax.random.key(2))
    assert abs(factors.mean() - 1) < 5 * np.sqrt(0.4 / 0.6 / factors.size)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
@pytest.mark.parametrize(
    "shape", [Shape(T=9, S=21, N=4, K=2), Shape(B=1, T=70, S=600, N=1)], ids=str
)
def test_forward_and_gradients(implementation, shape, dtype):
    """The backward uses the same mask as the forward."""
    make_call(shape, dtype, dropout_rate=0.3, dropout_key=jax.random.key(9)).check(implementation)


def test_statistics_ignore_dropout(implementation):
    call = make_call(Shape(T=9, S=21), dropout_rate=0.5, dropout_key=jax.random.key(9))
    lse = call.check(implementation, gradients=False)["lse"]
    without = flash_attention(
        *(call.arrays[n] for n in ("query", "key", "value")),
        return_residual=True,
        implementation=implementation,
    )[1]
    np.testing.assert_allclose(lse, without, rtol=1e-6, atol=1e-6)


def test_mask_does_not_depend_on_sizes_or_offsets(implementation):
    """Position (i, j) draws the same bits in a longer call and with an offset."""
    rng_key = jax.random.key(4)
    small = kept(implementation, (1, 2, 9, 21), 0.5, rng_key) > 0
    large = kept(implementation, (3, 4, 70, 200), 0.5, rng_key) > 0
    np.testing.assert_array_equal(large[:1, :2, :9, :21], small)
    shifted = kept(implementation, (1, 2, 9, 21), 0.5, rng_key, is_causal=True, query_offset=20) > 0
    np.testing.assert_array_equal(shifted, small)


def test_rate_zero_is_no_dropout(implementation):
    call = make_call(Shape(T=9, S=21), dropout_rate=0.0)
    plain = call.check(implementation)
    call.arrays["dropout_key"] = jax.random.key(0)
    for name, value in call.check(implementation).items():
        assert_same(value, plain[name], name)


def test_implementations_agree_bit_for_bit(native):
    shape, rng_key = (2, 2, 130, 140), jax.random.key(8)
    one, two = (kept(i, shape, 0.37, rng_key) > 0 for i in (native, "xla"))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("batched_key", [False, True])
def test_vmap_equals_the_loop(implementation, batched_key):
    """One key for all gives every example the same mask, as in the loop; own keys, own masks."""
    call = make_call(Shape(B=3, T=9, S=21, N=2, H=4))
    qkv = tuple(call.arrays[n] for n in ("query", "key", "value"))
    keys = jax.random.split(jax.random.key(1), 3)

    def attend(q, k, v, rng_key):
        return flash_attention(
            q, k, v, dropout_rate=0.5, dropout_key=rng_key, implementation=implementation
        )

    def example_key(b):
        return keys[b if batched_key else 0]

    mapped = jax.vmap(attend, (0, 0, 0, 0 if batched_key else None))(
        *qkv, keys if batched_key else keys[0]
    )
    loop = np.stack([attend(*(x[b] for x in qkv), example_key(b)) for b in range(3)])
    np.testing.assert_allclose(mapped, loop, rtol=1e-6, atol=1e-6)


def test_batch_entries_differ_within_one_call(implementation):
    factors = kept(implementation, (2, 2, 32, 32), 0.5, jax.random.key(1)) > 0
    planes = factors.reshape(4, -1)
    for a in range(4):
        for b in range(a):
            assert (planes[a] != planes[b]).mean() > 0.4


def test_remat_and_scan_draw_the_same_mask(implementation):
    call = make_call(Shape(T=9, S=21))
    qkv = tuple(call.arrays[n] for n in ("query", "key", "value"))
    rng_key = jax.random.key(1)

    def loss(q, k, v):
        output = flash_attention(
            q, k, v, dropout_rate=0.5, dropout_key=rng_key, implementation=implementation
        )
        return (output**2).sum()

    plain = jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv)
    remat = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*qkv)
    for a, b in zip(plain, remat, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
