"""One call of `flash_attention`: make its arrays, run it, compare it with the reference."""

import collections
import dataclasses
import functools
import hashlib
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
import reference
import tolerance
from jaxflash import flash_attention

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "scale")
QKV = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes by their letters; B=None is an unbatched call, K=None and Hv=None mean N and H."""

    B: int | None = 2
    T: int = 7
    S: int = 9
    N: int = 2
    K: int | None = None
    H: int = 16
    Hv: int | None = None

    @property
    def batch(self):
        return () if self.B is None else (self.B,)

    @property
    def kv_heads(self):
        return self.N if self.K is None else self.K

    @property
    def value_depth(self):
        return self.H if self.Hv is None else self.Hv


@dataclasses.dataclass
class Call:
    """`arrays` are traced, `options` are Python values; both are arguments of `flash_attention`."""

    arrays: dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    @functools.cached_property
    def cotangents(self):
        """Random cotangents of the output and of the log-sum-exp."""
        rng = np.random.default_rng([self.seed, 1])
        query, value = self.arrays["query"], self.arrays["value"]
        output = query.shape[:-1] + value.shape[-1:]
        return (
            rng.standard_normal(output).astype(query.dtype),
            rng.standard_normal(query.shape[:-1]).astype(np.float32),
        )

    def flash(self, implementation, gradients=True):
        """Output, log-sum-exp and gradients of the implementation, all from one jitted function."""
        names = tuple(n for n in DIFFERENTIABLE if n in self.arrays) if gradients else ()
        run = compiled(implementation, names, tuple(sorted(self.options.items())))
        cotangents = self.cotangents if gradients else None
        return jax.tree.map(np.asarray, run(self.arrays, cotangents))

    def reference(self, precision, gradients=True):
        d_output, d_lse = self.cotangents if gradients else (None, None)
        options = {n: v for n, v in self.options.items() if n != "deterministic_gradients"}
        with np.errstate(over="ignore", under="ignore"):
            return reference.attention(
                **self.arrays,
                **options,
                precision=precision,
                output_cotangent=d_output,
                lse_cotangent=d_lse,
            )

    def check(self, implementation, gradients=True):
        """Compares everything with the reference; returns what was computed."""
        got = self.flash(implementation, gradients)
        compare(got, self, gradients)
        return got


def compare(got, call, gradients=True):
    """Each result within its tolerance, and exactly 0 (-inf) where nothing is visible."""
    for name, value in got.items():
        measure = yardstick(name, call, gradients)
        assert value.dtype == measure.storage, f"{name} is {value.dtype}, not {measure.storage}"
        tolerance.assert_close(name, value, measure)
    _assert_zeros(got, _references(call, gradients)[0]["visible"], call.arrays)


def yardstick(name, call, gradients=True):
    """What a result of a call is measured by."""
    dtype = call.arrays["query"].dtype
    exact, working = _references(call, gradients)
    argument = call.arrays.get(name.removeprefix("d_"))
    spread = 0.0
    if rows := exact["rows"].get(name):
        spread = max(tolerance.row_spread(rows, w["rows"][name]) for w in working)
    return tolerance.Yardstick(
        exact=exact[name],
        working=[w[name] for w in working],
        magnitude=exact["magnitude"][name],
        storage={"output": dtype, "lse": np.dtype(np.float32)}.get(name) or argument.dtype,
        compute=reference.working(dtype).compute,
        spread=spread,
    )


# The implementations are compared with the same numbers, one after the other.
_recent_references = collections.OrderedDict()


def _references(call, gradients):
    """The exact results, and three at the working precision that differ in rounding."""
    fingerprint = _fingerprint(call, gradients)
    if fingerprint not in _recent_references:
        dtype = call.arrays["query"].dtype
        _recent_references[fingerprint] = (
            call.reference(reference.exact(dtype), gradients),
            [call.reference(reference.working(dtype, jitter), gradients) for jitter in (0, 1, -1)],
        )
        if len(_recent_references) > 100:
            _recent_references.popitem(last=False)
    return _recent_references[fingerprint]


def _fingerprint(call, gradients):
    digest = hashlib.sha256(repr((sorted(call.options.items()), gradients)).encode())
    arrays = dict(call.arrays)
    if gradients:
        arrays |= zip(("d_output", "d_lse"), call.cotangents, strict=True)
    for name, array in sorted(arrays.items()):
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        array = np.asarray(array)
        digest.update(f"{name} {array.shape} {array.dtype}".encode() + array.tobytes())
    return digest.digest()


def _assert_zeros(got, visible, arrays):
    heads_last = np.moveaxis(visible, -3, -1)  # [*B,T,S,N]
    unseen_rows = ~heads_last.any(-2)
    kv_heads = arrays["key"].shape[-2]
    group = visible.shape[-3] // kv_heads
    grouped = visible.reshape(*visible.shape[:-3], kv_heads, group, *visible.shape[-2:])
    unseen_keys = ~np.moveaxis(grouped.any((-3, -2)), -2, -1)  # [*B,S,K]
    for name, unseen in {
        "output": unseen_rows, "d_query": unseen_rows, "d_key": unseen_keys, "d_value": unseen_keys,
    }.items():  # fmt: skip
        if name in got:
            assert not got[name][unseen].any(), f"{name} must be exactly 0 where nothing is visible"
    if "d_bias" in got and got["d_bias"].shape == visible.shape:
        assert not got["d_bias"][~visible].any(), (
            "d_bias must be exactly 0 where nothing is visible"
        )


@functools.cache
def compiled(implementation, names, options):
    """Jitted `(arrays, cotangents) -> results`, differentiated with respect to `names`."""

    def run(arrays, cotangents):
        def attend(differentiable):
            return flash_attention(
                **{**arrays, **differentiable},
                **dict(options),
                return_residual=True,
                implementation=implementation,
            )

        differentiable = {n: arrays[n] for n in names}
        if not names:
            output, lse = attend(differentiable)
            return {"output": output, "lse": lse}
        (output, lse), pull = jax.vjp(attend, differentiable)
        (gradients,) = pull(cotangents)
        return {"output": output, "lse": lse, **{"d_" + n: g for n, g in gradients.items()}}

    return jax.jit(run)


def assert_same(got, expected, name):
    """A result and its like from another run: equal bit by bit.

    But for a GPU's gradients, which are added up in any order unless `deterministic_gradients` are
    asked for: these differ by rounding.
    """
    if name.startswith("d_") and jax.default_backend() == "gpu":
        wide = [np.asarray(x, np.float64) for x in (got, expected)]
        noise = 8 * tolerance.wobble(np.abs(wide[1]).max(initial=0), got.dtype)
        np.testing.assert_allclose(*wide, rtol=0, atol=noise, err_msg=name)
    else:
        np.testing.assert_array_equal(got, expected, err_msg=name)


def normal(rng, shape, dtype=np.float32, scale=1.0):
    """Normal random numbers in a NumPy array."""
    return (scale * rng.standard_normal(shape)).astype(dtype)


def make_call(shape=Shape(), dtype=np.float32, seed=0, **arguments):
    """A call on normal random query, key and value.

    `arguments`: NumPy and JAX arrays are traced, everything else stays a Python value; a function
    is called with a random generator to make its array. The arguments' names seed the generator, so
    that no two tests share numbers.
    """
    rng = np.random.default_rng([seed, zlib.crc32(repr((shape, sorted(arguments))).encode())])
    arrays = {
        "query": normal(rng, (*shape.batch, shape.T, shape.N, shape.H), dtype),
        "key": normal(rng, (*shape.batch, shape.S, shape.kv_heads, shape.H), dtype),
        "value": normal(rng, (*shape.batch, shape.S, shape.kv_heads, shape.value_depth), dtype),
    }
    options = {}
    for name, argument in arguments.items():
        argument = argument(rng) if callable(argument) else argument
        traced = isinstance(argument, (np.ndarray, jax.Array))
        (arrays if traced else options)[name] = argument
    return Call(arrays, options, seed)


def bfloat16():
    return np.dtype(jnp.bfloat16)


def repeat(run, arrays, count):
    """Calls a function so many times, and waits for the last result."""
    for _ in range(count):
        result = run(*arrays)
    jax.block_until_ready(result)


def python_environment(**variables):
    """The environment for a fresh interpreter."""
    # The package under test, not the source folder that the interpreter may be started in.
    package = Path(jaxflash.__file__).parent.parent
    return {**os.environ, "PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu", **variables}


def run_python(script, *arguments, environment=None):
    """Runs a script in a fresh interpreter; returns what it prints. A deadlock is a failure."""
    finished = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=python_environment(**(environment or {})),
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
