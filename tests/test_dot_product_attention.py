"""`jaxflash.dot_product_attention` in the place of `jax.nn.dot_product_attention`."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
import originals
import reference
from calls import bfloat16, normal

DTYPES = pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)

# What `jax.nn` calls the implementations.
JAX_NAMES = {"native": "cudnn", "xla": "xla", None: None}


def qkv(dtype=np.float32, B=2, T=7, S=9, N=4, K=4, H=5, unbatched=()):
    """Query, key and value; those named have no batch axis."""
    rng = np.random.default_rng([B, T, S, N, K, H])
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
    return {
        name: normal(rng, shape[1:] if name in unbatched else shape, dtype)
        for name, shape in shapes.items()
    }


def boolean(*shape):
    """A mask with some key in every row."""
    mask = np.random.default_rng(len(shape)).random(shape) < 0.5
    mask[..., 0] = True
    return mask


def test_signature():
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (jaxflash.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert ours == theirs


# Each sentence of the documentation of `jax.nn.dot_product_attention`: sizes, and arguments.
CASES = {
    "BTNH": ({}, {}),
    "TNH": (dict(B=1, unbatched=("query", "key", "value")), {}),
    "query TNH, key and value BSKH": (dict(B=1, unbatched=("query",)), {}),
    "grouped query attention": (dict(K=2), {}),
    "multi query attention": (dict(K=1), {}),
    "bias BNTS": ({}, dict(bias=(2, 4, 7, 9))),
    "bias 1NT1": (dict(K=2), dict(bias=(1, 4, 7, 1))),
    "bias B11S": ({}, dict(bias=(2, 1, 1, 9))),
    "bias NTS": (dict(B=1, unbatched=("query", "key", "value")), dict(bias=(4, 7, 9))),
    "bias TS": ({}, dict(bias=(7, 9))),
    "mask BNTS": ({}, dict(mask=boolean(2, 4, 7, 9))),
    "mask BNTS, grouped": (dict(K=2), dict(mask=boolean(2, 4, 7, 9))),
    "mask 11TS": ({}, dict(mask=boolean(1, 1, 7, 9))),
    "mask B1TS": ({}, dict(mask=boolean(2, 1, 7, 9))),
    "mask NTS": (
        dict(B=1, unbatched=("query", "key", "value")),
        dict(mask=boolean(4, 7, 9)),
    ),
    "mask S": ({}, dict(mask=boolean(9))),
    "scale": ({}, dict(scale=0.7)),
    "is_causal": ({}, dict(is_causal=True)),
    "is_causal, more queries": (dict(T=9, S=5), dict(is_causal=True)),
    "query_seq_lengths": ({}, dict(query_seq_lengths=[7, 3])),
    "key_value_seq_lengths": ({}, dict(key_value_seq_lengths=[1, 6])),
    "both lengths": ({}, dict(query_seq_lengths=[4, 7], key_value_seq_lengths=[9, 2])),
    "lengths of TNH": (
        dict(B=1, unbatched=("query", "key", "value")),
        dict(query_seq_lengths=[4], key_value_seq_lengths=[6]),
    ),
    "local_window_size (3, 2)": (dict(T=10, S=10), dict(local_window_size=(3, 2))),
    "local_window_size int": (dict(T=10, S=10), dict(local_window_size=2)),
    "window and causal": (dict(T=10, S=10), dict(local_window_size=(3, 2), is_causal=True)),
    "everything": (
        dict(T=9, K=2),
        dict(
            bias=(1, 4, 1, 9),
            mask=boolean(2, 1, 9, 9) | np.eye(9, dtype=bool),
            scale=0.3,
            is_causal=True,
            query_seq_lengths=[9, 5],
            key_value_seq_lengths=[9, 6],
            local_window_size=(4, 1),
        ),
    ),
}


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_documented(default_implementation, dtype, case):
    """Output, log-sum-exp and gradients are as near to the exact ones as those of `jax.nn`."""
    sizes, arguments = CASES[case]
    arrays, arguments = qkv(dtype, **sizes), dict(arguments)
    if bias := arguments.pop("bias", None):
        arrays["bias"] = normal(np.random.default_rng(5), bias, dtype)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if name in arguments:
            arguments[name] = np.asarray(arguments[name], np.int32)

    def call(function, **options):
        def run(arrays):
            output, residual = function(
                **arrays, **arguments, return_residual=True, implementation=options.get("name")
            )
            rows = exists.reshape(*residual.shape[:-1], 1)  # others differ, as documented
            return output, jnp.where(rows, residual, 0)

        return run

    def exact(arrays):
        query, key, value = (
            arrays[n].reshape(-1, *arrays[n].shape[-3:]) for n in ("query", "key", "value")
        )
        output, residual = originals.attention(
            query, key, value, arrays.get("bias"), visible=visible, scale=arguments.get("scale")
        )
        shape = arrays["query"].shape
        output = jnp.where(exists[..., None, None], output, 0).reshape(shape)
        return output, jax.lax.stop_gradient(
            jnp.where(exists[..., None], residual, 0).reshape(shape[:-1])
        )

    query, key = (arrays[n].reshape(-1, *arrays[n].shape[-3:]) for n in ("query", "key"))
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    rules = {n: a for n, a in arguments.items() if n not in ("scale", "query_seq_lengths")}
    visible, _ = reference.visibility(shape, **rules)
    lengths = arguments.get("query_seq_lengths", [shape[2]])
    exists = np.broadcast_to(
        np.arange(shape[2]) < np.asarray(lengths)[:, None], (shape[0], shape[2])
    )
    assert visible.any(-1).all()
    originals.compare(
        call(jaxflash.dot_product_attention, name=JAX_NAMES[default_implementation]),
        call(jax.nn.dot_product_attention),
        exact,
        arrays,
    )


@pytest.mark.parametrize("sizes", [{}, dict(B=1, unbatched=("query", "key", "value"))], ids=str)
def test_without_residual(default_implementation, sizes):
    arrays = qkv(**sizes)
    name = JAX_NAMES[default_implementation]
    alone = jaxflash.dot_product_attention(**arrays, implementation=name)
    output, _ = jaxflash.dot_product_attention(**arrays, implementation=name, return_residual=True)
    assert alone.shape == arrays["query"].shape
    np.testing.assert_array_equal(alone, output)


def test_default_implementation_is_that_of_flash_attention(native):
    arrays = qkv()
    np.testing.assert_array_equal(
        jaxflash.dot_product_attention(**arrays),
        jaxflash.flash_attention(**arrays, implementation=native),
    )


@pytest.mark.parametrize(("theirs", "ours"), [(None, None), ("xla", "xla"), ("cudnn", "native")])
def test_implementations(theirs, ours, monkeypatch):
    seen = []

    def spy(*args, implementation, **options):
        seen.append(implementation)
        return jaxflash.flash_attention(*args, implementation="xla", **options)

    monkeypatch.setattr(jaxflash._dot_product_attention, "flash_attention", spy)
    jaxflash.dot_product_attention(**qkv(), implementation=theirs)
    assert seen == [ours]


def test_rows_without_keys(default_implementation):
    """The documented difference: zeros and -inf, not the mean of all values."""
    arrays, mask = qkv(), boolean(2, 4, 7, 9)
    mask[1, 2, 3] = False
    output, residual = jaxflash.dot_product_attention(
        **arrays, mask=mask, return_residual=True, implementation=JAX_NAMES[default_implementation]
    )
    theirs = jax.nn.dot_product_attention(**arrays, mask=mask)
    assert not output[1, 3, 2].any()
    assert residual[1, 3, 2] == -np.inf
    originals.assert_equal_but_rounding(theirs[1, 3, 2], arrays["value"][1, :, 2].mean(0))
    seeing = np.moveaxis(mask.any(-1), 1, 2)
    assert np.isfinite(residual[seeing]).all()


def test_own_value_head_dim(default_implementation):
    arrays = qkv(B=1, unbatched=("query",))
    arrays["value"] = arrays["value"][..., :3]
    output = jaxflash.dot_product_attention(
        **arrays, implementation=JAX_NAMES[default_implementation]
    )
    assert output.shape == (7, 4, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(implementation="triton"), "implementation.*'triton'"),
        (dict(implementation="native"), "implementation.*'native'"),
        (dict(implementation=["xla"]), r"implementation.*\['xla'\]"),
        (dict(query=np.zeros((2, 7, 4, 6), np.float32)), "key.*head dim"),
        (dict(query=np.zeros((2, 7, 6, 5), np.float32)), "query.*multiple"),
        (dict(key=np.zeros((3, 9, 4, 5), np.float32)), "key.*batch"),
        (dict(value=np.zeros((2, 8, 4, 5), np.float32)), "value.*length"),
        (dict(query=np.zeros((1, 2, 7, 4, 5), np.float32)), "query.*axes"),
        (dict(key=np.zeros((2, 9, 4, 5), np.float16)), "key.*dtype"),
        (dict(mask=np.ones((2, 4, 7, 9), np.float32)), "mask.*bool"),
        (dict(mask=np.ones((1, 2, 4, 7, 9), bool)), "mask.*axes"),
        (dict(query_seq_lengths=np.zeros(3, np.int32)), "query_seq_lengths.*shape"),
        (dict(key_value_seq_lengths=np.zeros(2, np.float32)), "key_value_seq_lengths.*integer"),
    ],
    ids=str,
)
def test_what_jax_refuses_raises_here(change, named):
    arguments = qkv() | change
    with pytest.raises(Exception):  # noqa: B017, PT011
        jax.nn.dot_product_attention(**arguments)
    with pytest.raises((TypeError, ValueError), match=named):
        jaxflash.dot_product_attention(**arguments)


def test_vmap(default_implementation):
    """Under `vmap` with an unmapped key, as `jax.nn`'s."""
    arrays = qkv(B=3)

    def attend(function, name=None):
        def one(query, key, value):
            return function(query, key, value, is_causal=True, implementation=name)

        return lambda a: jax.vmap(one, (0, None, None))(a["query"], a["key"][0], a["value"][0])

    def exact(a):
        query, key, value = a["query"], *(jnp.stack([a[n][0]] * 3) for n in ("key", "value"))
        return originals.attention(query, key, value, visible=np.tri(7, 9, dtype=bool))[0]

    originals.compare(
        attend(jaxflash.dot_product_attention, JAX_NAMES[default_implementation]),
        attend(jax.nn.dot_product_attention),
        exact,
        arrays,
    )
