"""Operands shared over a mapped axis: each gradient alone must equal the loop's sum."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calls import normal
from jaxflash import flash_attention

MAPPED = [axes for axes in itertools.product((0, None), repeat=3) if any(a == 0 for a in axes)]
WANTED = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]


def arrays(axes, size=3):
    rng = np.random.default_rng(5)
    shapes = ((5, 4, 8), (7, 2, 8), (7, 2, 6))
    return [
        normal(rng, (size, *shape) if axis == 0 else shape)
        for axis, shape in zip(axes, shapes, strict=True)
    ]


@pytest.mark.parametrize("axes", MAPPED, ids=str)
def test_gradients_alone_of_shared_operands_equal_the_loop(implementation, axes):
    def attend(*operands):
        return flash_attention(*operands, implementation=implementation)

    def mapped(*operands):
        return jnp.sin(jax.vmap(attend, in_axes=axes)(*operands)).sum()

    def loop(*operands):
        rows = (
            [x[i] if axis == 0 else x for x, axis in zip(operands, axes, strict=True)]
            for i in range(3)
        )
        return sum(jnp.sin(attend(*row)).sum() for row in rows)

    operands = arrays(axes)
    for wanted in WANTED:
        got = jax.grad(mapped, argnums=wanted)(*operands)
        expected = jax.grad(loop, argnums=wanted)(*operands)
        for ours, theirs in zip(got, expected, strict=True):
            # The same kernel in another order of sums: a few ulps of sums over 3 rows.
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=str(wanted))


def test_five_batch_axes_of_alternating_broadcast(implementation):
    """More patterns than the kernel has batch axes: some are merged by copies, the numbers stay."""
    rng = np.random.default_rng(6)
    sizes = (2, 3, 2, 3, 2)
    query = normal(rng, (*sizes, 3, 2, 4))
    key, value = normal(rng, (2, 2, 2, 5, 1, 4)), normal(rng, (3, 3, 5, 1, 4))
    attend = lambda *x: flash_attention(*x, implementation=implementation)  # noqa: E731
    for level in reversed(range(5)):
        odd = level % 2
        attend = jax.vmap(attend, in_axes=(0, None if odd else 0, 0 if odd else None))
    got = jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), argnums=(0, 1, 2))(query, key, value)

    full = [
        query,
        jnp.broadcast_to(key[:, None, :, None], (*sizes, 5, 1, 4)),
        jnp.broadcast_to(value[None, :, None, :, None], (*sizes, 5, 1, 4)),
    ]
    flat = [x.reshape(-1, *x.shape[5:]) for x in full]
    expected = jax.grad(
        lambda *x: jnp.sin(flash_attention(*x, implementation=implementation)).sum(),
        argnums=(0, 1, 2),
    )(*flat)
    expected = [x.reshape(*sizes, *x.shape[1:]) for x in expected]
    expected = [expected[0], expected[1].sum((1, 3)), expected[2].sum((0, 2, 4))]
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_empty_batch_gives_zero_gradients_of_what_it_shares(implementation):
    x = jnp.zeros((0, 2, 4, 8))

    def loss(bias):
        return flash_attention(x, x, x, bias, implementation=implementation).sum()

    gradient = jax.grad(loss)(jnp.ones((1, 4, 2, 2)))
    np.testing.assert_array_equal(gradient, np.zeros((1, 4, 2, 2)))

    def shared(key):
        attend = lambda query: flash_attention(query, key, key, implementation=implementation)  # noqa: E731
        return jax.vmap(attend)(jnp.zeros((0, 3, 2, 4))).sum()

    np.testing.assert_array_equal(jax.grad(shared)(jnp.ones((5, 2, 4))), np.zeros((5, 2, 4)))


def test_nan_query_of_a_row_that_sees_nothing_reaches_no_gradient(implementation):
    rng = np.random.default_rng(7)
    query, key, value = (normal(rng, (1, 3, 2, 8)) for _ in range(3))
    query[0, 0] = np.nan  # with offset -1 query 0 sees no key

    def loss(operands, scale):
        return flash_attention(
            *operands, scale=scale, is_causal=True, query_offset=-1, implementation=implementation
        ).sum()

    gradients = jax.grad(loss, argnums=(0, 1))((query, key, value), 0.5)
    for gradient in jax.tree.leaves(gradients):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("size", [2**31, 2**32, 2**63 - 1, 2**70])
def test_windows_wider_than_any_axis_hide_nothing(implementation, size):
    query, key, value = arrays((None, None, None))
    got = flash_attention(query, key, value, local_window_size=size, implementation=implementation)
    plain = flash_attention(query, key, value, implementation=implementation)
    np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-6)
