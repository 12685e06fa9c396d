"""Output and log-sum-exp over sizes, dtypes, head ratios and each argument (no gradients here)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calls import Shape, bfloat16, make_call, normal
from jaxflash import flash_attention

# (T, S): one, odd, and each side of the native tiles of 64 queries by 128 keys.
LENGTHS = [
    (1, 1),
    (1, 130),
    (7, 63),
    (63, 65),
    (65, 129),
    (64, 128),
    (130, 7),
    (257, 1),
    (130, 257),
]


@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_lengths(implementation, T, S):
    make_call(Shape(B=2, T=T, S=S, N=2, H=40)).check(implementation, gradients=False)


@pytest.mark.parametrize(
    ("H", "Hv"), [(1, 1), (3, 16), (16, 1), (40, 72), (64, 128), (96, 3), (256, 200)]
)
def test_head_dims(implementation, H, Hv):
    make_call(Shape(T=9, S=70, H=H, Hv=Hv)).check(implementation, gradients=False)


@pytest.mark.parametrize(("N", "K"), [(1, 1), (3, 3), (4, 2), (6, 1), (12, 3)])
def test_head_ratios(implementation, N, K):
    make_call(Shape(T=9, S=21, N=N, K=K)).check(implementation, gradients=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16()], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_dtypes(implementation, dtype, is_causal):
    call = make_call(Shape(T=130, S=257, H=64), dtype, is_causal=is_causal)
    call.check(implementation, gradients=False)


def test_keys_split_over_parallel_tasks(implementation):
    """One head and many keys: the only parallelism is along the keys."""
    make_call(Shape(B=1, T=5, S=700, N=1, H=16)).check(implementation, gradients=False)


def test_many_batches_and_heads(implementation):
    make_call(Shape(B=37, T=3, S=5, N=6, K=2, H=8)).check(implementation, gradients=False)


@pytest.mark.parametrize(
    "argument",
    [
        {"bias": lambda rng: normal(rng, (4, 9, 21))},
        {"mask": lambda rng: rng.random((1, 9, 21)) < 0.7},
        {"query_seq_lengths": np.array(5)},
        {"key_value_seq_lengths": np.array(13)},
        {"query_offset": np.array(3), "is_causal": True},
        {"query_segment_ids": np.arange(9) // 3, "key_value_segment_ids": np.arange(21) // 7},
        {"sinks": lambda rng: normal(rng, 4)},
        {"dropout_rate": 0.3, "dropout_key": jax.random.key(5)},
    ],
    ids=lambda a: "-".join(a),
)
def test_unbatched(implementation, argument):
    """3-D inputs: every per-batch argument loses its B."""
    make_call(Shape(B=None, T=9, S=21, N=4, K=2), **argument).check(implementation)


@pytest.mark.parametrize(
    "scale",
    [None, 0.3, 2, np.float64(0.5), np.float32(0.75), np.asarray(0.25, np.float32)],
    ids=repr,
)
def test_scale(implementation, scale):
    make_call(Shape(T=9, S=21), scale=scale).check(implementation, gradients=False)


def test_numpy_and_jax_arrays_and_keyword_names(implementation):
    call = make_call(
        Shape(T=9, S=21),
        bias=lambda rng: normal(rng, (1, 1, 9, 21)),
        mask=lambda rng: rng.random((1, 1, 9, 21)) < 0.5,
    )
    q, k, v, bias, mask = call.arrays.values()
    by_position = flash_attention(q, k, v, bias, mask, implementation=implementation)
    by_name = flash_attention(
        query=jnp.asarray(q),
        key=jnp.asarray(k),
        value=jnp.asarray(v),
        bias=jnp.asarray(bias),
        mask=jnp.asarray(mask),
        implementation=implementation,
    )
    assert isinstance(by_position, jax.Array)
    np.testing.assert_array_equal(by_position, by_name)


def test_default_implementation(implementation):
    """Without `implementation`: native where it is available, and then without a warning."""
    call = make_call(Shape(T=9, S=21))
    if implementation == "native":
        call.check(None, gradients=False)


@pytest.mark.parametrize("is_causal", [False, True])
def test_drop_in_for_jax_nn(implementation, is_causal):
    """Same names, same meaning as `jax.nn.dot_product_attention`, also in the residual."""
    arguments = {
        "bias": lambda rng: normal(rng, (2, 1, 21, 21)),
        "key_value_seq_lengths": np.array([12, 21], np.int32),
        "query_seq_lengths": np.array([21, 15], np.int32),
        "local_window_size": (5, 2),
    }
    call = make_call(Shape(T=21, S=21, N=4, K=2), is_causal=is_causal, scale=0.4, **arguments)
    with jax.default_matmul_precision("float32"):
        theirs, their_lse = jax.nn.dot_product_attention(
            **call.arrays, **call.options, return_residual=True
        )
    ours, our_lse = flash_attention(
        **call.arrays, **call.options, return_residual=True, implementation=implementation
    )
    seen = np.isfinite(our_lse)
    assert seen.mean() > 0.5
    np.testing.assert_allclose(ours[seen], theirs[seen], atol=3e-6)
    np.testing.assert_allclose(our_lse[seen], their_lse[seen], rtol=1e-6, atol=3e-6)


def test_matmul_precision_is_float32_unless_asked(implementation):
    """TF32 or bfloat16 products would be a thousand times the error allowed here."""
    call = make_call(Shape(B=1, T=65, S=65, H=64))
    exact = call.check(implementation, gradients=False)["output"]
    with jax.default_matmul_precision("bfloat16"):
        lower = flash_attention(**call.arrays, implementation=implementation)
    np.testing.assert_allclose(lower, exact, atol=0.05)
