"""64-bit mode, weak types, wide and unsigned integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calls import QKV, Shape, bfloat16, make_call, normal
from jaxflash import flash_attention


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True, "local_window_size": 30, "query_offset": np.array([3, -3])},
        {
            "bias": lambda rng: normal(rng, (2, 1, 70, 140), np.float64),
            "sinks": lambda rng: normal(rng, 4, np.float64),
            "scale": np.asarray(0.3),
            "logits_soft_cap": 3.0,
            "key_value_seq_lengths": np.array([139, 0]),
            "dropout_rate": 0.2,
            "dropout_key": 0,
        },
    ],
    ids=["plain", "ranges", "the rest"],
)
def test_float64(float64_implementation, arguments):
    """Float64 accuracy in everything (errors about 1e-15) but the log-sum-exp, which is float32."""
    if "dropout_key" in arguments:
        arguments = {**arguments, "dropout_key": jax.random.key(0)}
    call = make_call(Shape(T=70, S=140, N=4, K=2, H=24), np.float64, **arguments)
    call.check(float64_implementation)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
def test_lower_precision_is_the_same_in_64_bit_mode(implementation, dtype):
    """Python numbers, int64 ids and lengths widen nothing."""
    call = make_call(
        Shape(T=9, S=21),
        dtype,
        scale=0.3,
        logits_soft_cap=2.0,
        local_window_size=5,
        query_offset=np.array([3, -3]),
        query_seq_lengths=np.array([9, 4]),
        key_value_seq_lengths=np.array([20, 21]),
        query_segment_ids=lambda rng: rng.integers(0, 2, (2, 9)),
        key_value_segment_ids=lambda rng: rng.integers(0, 2, (2, 21)),
        sinks=lambda rng: normal(rng, 2),
        dropout_rate=0.2,
        dropout_key=jax.random.key(0),
    )
    assert call.arrays["query_segment_ids"].dtype == np.int64
    wide = call.check(implementation)
    with jax.enable_x64(False):
        narrow = call.check(implementation)
    for name, value in wide.items():
        assert value.dtype == narrow[name].dtype
        np.testing.assert_allclose(
            value.astype(np.float32), narrow[name].astype(np.float32), rtol=1e-5, atol=1e-6
        )


@pytest.mark.usefixtures("x64")
def test_float64_bias_sinks_and_scale_with_a_float32_query(implementation):
    """Their gradients keep their dtype."""
    call = make_call(
        Shape(T=9, S=21),
        bias=lambda rng: normal(rng, (1, 2, 9, 21), np.float64),
        sinks=lambda rng: normal(rng, 2, np.float64),
        scale=np.asarray(0.3, np.float64),
    )

    def attend(bias, sinks, scale):
        return flash_attention(
            *(call.arrays[n] for n in QKV),
            bias,
            sinks=sinks,
            scale=scale,
            implementation=implementation,
        )

    output, pull = jax.vjp(attend, *(call.arrays[n] for n in ("bias", "sinks", "scale")))
    assert output.dtype == np.float32
    assert [g.dtype for g in pull(output)] == [np.float64] * 3


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("base", [0, 7, -(2**62)])
def test_int64_ids_that_differ_above_32_bits(implementation, base):
    """Truncation to 32 bits would merge all these documents."""
    q_ids = (np.arange(9) // 3).astype(np.int64) * 2**32 + base
    k_ids = (np.arange(21) // 7).astype(np.int64) * 2**32 + base
    call = make_call(Shape(B=None, T=9, S=21), query_segment_ids=q_ids, key_value_segment_ids=k_ids)
    exact = call.check(implementation)
    jitted = jax.jit(lambda a: flash_attention(**a, implementation=implementation))(call.arrays)
    np.testing.assert_allclose(jitted, exact["output"], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_huge_lengths_and_offsets_in_64_bits(implementation, dtype):
    """2^32 + 5 is not 5."""
    call = make_call(
        Shape(T=9, S=21),
        query_seq_lengths=np.array([2**32 + 5, 5], dtype),
        key_value_seq_lengths=np.array([2**40 + 1, 3], dtype),
        query_offset=np.array([2**33, 1], dtype),
        is_causal=True,
    )
    call.check(implementation)


def test_unsigned_ids_with_the_top_bit(implementation):
    """uint32 ids above 2^31 are neither negative nor equal to others, beside int32 ones."""
    q_ids = np.array([0, 2**31, 2**32 - 1, 5, 2**31 - 1], np.uint32)
    k_ids = np.array([2**32 - 1, 0, 2**31, 5, 7, 2**31 + 1], np.uint32)
    make_call(Shape(B=None, T=5, S=6), query_segment_ids=q_ids, key_value_segment_ids=k_ids).check(
        implementation
    )


def test_ids_of_two_dtypes(implementation):
    """A uint32 id of 2^32 - 1 is not the int32 id -1."""
    q_ids = np.array([0, 2**32 - 1, 5, 7, 2**31], np.uint32)
    k_ids = np.array([-1, 0, 5, 7, 7, -(2**31)], np.int32)
    make_call(Shape(B=None, T=5, S=6), query_segment_ids=q_ids, key_value_segment_ids=k_ids).check(
        implementation
    )


@pytest.mark.parametrize("dtype", [np.float32, bfloat16(), np.float16], ids=str)
@pytest.mark.parametrize("x64", [False, True])
def test_result_dtypes(implementation, dtype, x64):
    """Output in the query's dtype, log-sum-exp in float32, none of them weak."""
    with jax.enable_x64(x64):
        arrays = {n: jnp.asarray(x) for n, x in make_call(Shape(T=9, S=21), dtype).arrays.items()}
        output, lse = flash_attention(
            **arrays,
            scale=0.3,
            logits_soft_cap=2.0,
            return_residual=True,
            implementation=implementation,
        )
        assert output.dtype == dtype
        assert lse.dtype == np.float32
        assert not output.weak_type
        assert not lse.weak_type


def test_float64_needs_64_bit_mode(implementation):
    """Without it NumPy float64 arrays become float32, as everywhere in JAX."""
    arrays = make_call(Shape(T=9, S=21), np.float64).arrays
    output = flash_attention(**arrays, implementation=implementation)
    assert output.dtype == np.float32
