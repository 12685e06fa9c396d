"""Checks of the arguments of `flash_attention`, all at trace time.

Each error names the argument, what was expected and what came. `TypeError`: the wrong kind or
dtype; `ValueError`: the wrong shape, range or combination.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxflash._dropout import SharedKey
from jaxflash._operands import compute_dtype

MAX_HEAD_DIM = 256
# No two positions are so far apart: axes are below 2^31, offsets are clipped to 2^30.
_BEYOND_EVERY_KEY = 2**32
IMPLEMENTATIONS = (None, "native", "xla")

QUERY_DTYPES = ("bfloat16", "float16", "float32", "float64")
_LAYOUT_HINT = "the layout is [B, T, N, H]: sequence before heads"


def as_array(name: str, value: Any) -> jax.Array:
    """An array argument as a JAX array."""
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: expected an array, got {_describe(value)}")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name}: expected an array, got {_describe(value)}") from error


def as_integers(name: str, value: Any) -> Any:
    """An integer argument as a JAX array, or as a NumPy array where it isn't one yet.

    NumPy's stay in NumPy, because `jnp.asarray` would cut 64-bit integers to 32 bits. Python's are
    clipped to 64 bits.
    """
    if type(value) is int:
        limits = np.iinfo(np.int64)
        value = min(max(value, int(limits.min)), int(limits.max))
    if not isinstance(value, jax.Array):
        try:
            value = np.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"{name}: expected integers, got {_describe(value)}") from error
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer dtype, got {value.dtype}")
    return value


def check_attention_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Checks dtypes and shapes of query, key and value against each other."""
    check_dtype("query", query.dtype)
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            raise TypeError(f"{name}: expected the query's dtype {query.dtype}, got {array.dtype}")
    if query.ndim not in (3, 4):
        raise ValueError(
            f"query: expected 4 axes [B, T, N, H], or 3 axes [T, N, H] unbatched, "
            f"got {query.ndim} axes, shape {query.shape}"
        )
    for name, array in (("key", key), ("value", value)):
        if array.ndim != query.ndim:
            raise ValueError(
                f"{name}: expected {query.ndim} axes like the query {query.shape}, "
                f"got {array.ndim} axes, shape {array.shape}"
            )
        if array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name}: expected the query's batch size {query.shape[0]}, "
                f"got {array.shape[0]}, shape {array.shape}"
            )
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not 1 <= array.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: expected a head dim (last axis) from 1 to {MAX_HEAD_DIM}, "
                f"got {array.shape[-1]}, shape {array.shape}; {_LAYOUT_HINT}"
            )
        if array.shape[-2] == 0:
            raise ValueError(f"{name}: expected at least 1 head, got 0, shape {array.shape}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key: expected the query's head dim {query.shape[-1]} (last axis), "
            f"got {key.shape[-1]}, shape {key.shape}"
        )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"value: expected the key's length and heads {key.shape[-3:-1]} (axes -3, -2), "
            f"got {value.shape[-3:-1]}, shape {value.shape}"
        )
    heads, key_heads = query.shape[-2], key.shape[-2]
    if heads % key_heads:
        raise ValueError(
            f"query: expected a number of heads (axis -2) that is a multiple of the {key_heads} "
            f"key/value heads, got {heads}, shape {query.shape}; {_LAYOUT_HINT}"
        )


def check_dtype(name: str, dtype: Any) -> None:
    """Checks that a dtype is one of queries."""
    try:
        known = jnp.dtype(dtype) in QUERY_DTYPES
    except TypeError:
        known = False
    if not known:
        raise TypeError(f"{name}: expected one of {', '.join(QUERY_DTYPES)}, got {dtype}")


def check_pairwise(name: str, array: jax.Array, shape: Sequence[int]) -> None:
    """Checks that a bias or a mask is broadcastable to the logits' `shape`."""
    letters = "[B, N, T, S]" if len(shape) == 4 else "[N, T, S]"
    fits = array.ndim == len(shape) and all(
        size in (1, full) for size, full in zip(array.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: expected {len(shape)} axes broadcastable to {letters} = {tuple(shape)}, "
            f"got {array.ndim} axes, shape {array.shape}"
        )


def check_bias_dtype(bias: jax.Array) -> None:
    """Checks that a bias is floating."""
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        hint = "; pass booleans as mask" if bias.dtype == bool else ""
        raise TypeError(f"bias: expected a floating dtype, got {bias.dtype}{hint}")


def check_mask_dtype(mask: jax.Array) -> None:
    """Checks that a mask is boolean."""
    if mask.dtype != bool:
        raise TypeError(
            f"mask: expected dtype bool (True = visible), got {mask.dtype}; "
            "pass additive masks as bias"
        )


def check_shape(name: str, shape: Sequence[int], expected: Sequence[int], letters: str) -> None:
    """Checks the shape of an argument exactly."""
    if tuple(shape) != tuple(expected):
        raise ValueError(
            f"{name}: expected shape {letters} = {tuple(expected)}, got {tuple(shape)}"
        )


def check_per_batch(name: str, shape: Sequence[int], batch: Sequence[int]) -> None:
    """Checks the shape of an argument with one entry a batch row."""
    check_shape(name, shape, batch, "[B]" if batch else "[] (unbatched inputs)")


def check_segment_ids(
    name: str, shape: Sequence[int], array_shape: Sequence[int], letter: str
) -> None:
    """Checks the shape of segment ids against that of their query or key."""
    letters = f"[B, {letter}]" if len(array_shape) == 4 else f"[{letter}] (unbatched inputs)"
    check_shape(name, shape, array_shape[:-2], letters)


def check_both(**arguments: Any) -> None:
    """Checks that arguments that belong together are all there."""
    for name, argument in arguments.items():
        if argument is None:
            raise ValueError(
                f"{name}: expected an array, because {' and '.join(arguments)} go together, "
                "got None"
            )


def check_scale(scale: Any) -> None:
    """Checks that a scale is a real scalar."""
    if not isinstance(scale, (int, float, np.generic, np.ndarray, jax.Array)):
        raise TypeError(f"scale: expected a real scalar, got {_describe(scale)}")
    shape, dtype = jnp.shape(scale), jnp.result_type(scale)
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not real:
        raise TypeError(f"scale: expected a real scalar, got dtype {dtype}")
    if shape:
        raise ValueError(f"scale: expected a scalar, got shape {shape}")


def check_flag(name: str, value: Any) -> bool:
    """Checks that a flag is a Python or NumPy bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {_describe(value)}")
    return bool(value)


def check_size(name: str, value: Any) -> int:
    """Checks that a size is a Python or NumPy int, 1 or more."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an int, got {_describe(value)}")
    if value < 1:
        raise ValueError(f"{name}: expected 1 or more, got {value}")
    return int(value)


def check_sinks(sinks: jax.Array, heads: int) -> None:
    """Checks dtype and shape of the sinks."""
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks: expected a floating dtype, got {sinks.dtype}")
    check_shape("sinks", sinks.shape, (heads,), "[N]")


def check_soft_cap(cap: Any, dtype: Any) -> float:
    """The soft cap as a float, 0 for None."""
    if cap is None:
        return 0.0
    cap_value = _static_number("logits_soft_cap", cap)
    limits = np.finfo(compute_dtype(dtype))
    if not float(limits.tiny) <= cap_value <= float(limits.max):
        raise ValueError(
            f"logits_soft_cap: expected a finite number > 0 (in {limits.dtype}), got {cap}"
        )
    return cap_value


def check_window(window: Any) -> tuple[int, int]:
    """The window as (left, right), -1 for unlimited."""
    if window is None:
        return -1, -1
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(
                f"local_window_size: expected an int or (left, right), got {len(window)} entries: "
                f"{window}"
            )
        left, right = (_window_side(window, side) for side in window)
        return left, right
    side = _window_side(window, window)
    return side, side


def _window_side(window: Any, side: Any) -> int:
    if side is None:
        return -1
    if isinstance(side, (bool, np.bool_, jax.Array)):
        raise TypeError(
            f"local_window_size: expected static ints >= 0 or None, got {_describe(window)}"
        )
    try:
        size = operator.index(side)
    except TypeError as error:
        raise TypeError(
            f"local_window_size: expected static ints >= 0 or None, got {_describe(window)}"
        ) from error
    if size < 0:
        raise ValueError(
            f"local_window_size: expected ints >= 0 (None for unlimited), got {window}"
        )
    return size if size < _BEYOND_EVERY_KEY else -1


def check_rate(name: str, rate: Any) -> float:
    """A rate of dropout as a float."""
    rate_value = _static_number(name, rate)
    if not 0 <= rate_value < 1:
        raise ValueError(f"{name}: expected a number in [0, 1), got {rate}")
    return rate_value


def check_dropout(rate: Any, key: Any) -> float:
    """The dropout rate as a float; checks the key where there is one."""
    rate_value = check_rate("dropout_rate", rate)
    if key is None:
        if rate_value:
            raise ValueError(
                f"dropout_key: expected a JAX PRNG key, because dropout_rate is {rate}, got None"
            )
        return rate_value
    if isinstance(key, SharedKey):
        key = key.key
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is None or shape is None:
        raise TypeError(f"dropout_key: expected a JAX PRNG key, got {_describe(key)}")
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        check_shape("dropout_key", shape, (), "of one key")
    elif dtype == np.uint32:
        # A raw key, as `jax.random.PRNGKey` makes it.
        check_shape("dropout_key", shape, _raw_key_shape(), "of one raw key")
    else:
        raise TypeError(f"dropout_key: expected a JAX PRNG key, got dtype {dtype}, shape {shape}")
    return rate_value


def _raw_key_shape() -> tuple[int, ...]:
    """The shape of a raw key of the default implementation."""
    return jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape


def check_implementation(implementation: Any) -> None:
    """Checks that an implementation is known."""
    known = implementation is None or isinstance(implementation, str)
    if not known or implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f'implementation: expected None, "native" or "xla", got {implementation!r}'
        )


def _static_number(name: str, value: Any) -> float:
    """A Python or NumPy real scalar as a float."""
    bad = isinstance(value, (bool, np.bool_, jax.Array, str, bytes)) or np.ndim(value) != 0
    if not bad:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            bad = True
        else:
            return number
    raise TypeError(f"{name}: expected a static real number, got {_describe(value)}")


def _describe(value: Any) -> str:
    """What came, in words: type, and shape and dtype or the value."""
    if isinstance(value, (jax.Array, np.ndarray)):
        kind = "a traced array" if isinstance(value, Tracer) else "an array"
        return f"{kind} of shape {value.shape}, dtype {value.dtype}"
    return "None" if value is None else f"{type(value).__name__} {value!r}"
