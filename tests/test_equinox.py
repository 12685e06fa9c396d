"""`jaxflash.equinox.MultiheadAttention` in the place of `eqx.nn.MultiheadAttention`."""

import inspect
import io
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import originals
from calls import bfloat16, normal, run_python
from jaxflash.equinox import MultiheadAttention

Original = eqx.nn.MultiheadAttention
DTYPES = pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
KEY = jax.random.key(5)
T, S = 7, 9
# All sizes differ from each other.
SIZES = dict(
    num_heads=4, query_size=6, key_size=5, value_size=3, output_size=8, qk_size=10, vo_size=11
)
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


@pytest.fixture
def make(default_implementation):
    """The constructor of the layer under test."""

    def construct(*args, **kwargs):
        return MultiheadAttention(*args, **kwargs, implementation=default_implementation)

    return construct


def inputs(dtype=np.float32, *, batch=()):
    rng = np.random.default_rng(len(batch))
    return tuple(
        normal(rng, (*batch, length, channels), dtype)
        for length, channels in ((T, 6), (S, 5), (S, 3))
    )


def random_mask(*shape):
    mask = np.random.default_rng(len(shape)).random(shape) < 0.5
    mask[..., 0] = True
    return mask


def compare(mine, theirs, dtype=np.float32, call=None, arrays=None, spread=lambda layer: layer):
    """Outputs and gradients of two layers with the weights of `mine`.

    `spread` makes the weights of `theirs` from those of `mine`.
    """
    call = call or (lambda layer, *arrays: layer(*arrays))
    weights = eqx.filter(mine, eqx.is_array)

    def run(layer, spread):
        def function(tree):
            leaves = jax.tree.leaves(spread(tree["weights"]))
            structure = jax.tree.structure(eqx.filter(layer, eqx.is_array))
            filled = eqx.combine(jax.tree.unflatten(structure, leaves), layer)
            return call(filled, *tree["arrays"])

        return function

    tree = {"weights": weights, "arrays": inputs(dtype) if arrays is None else arrays}
    original = run(theirs, spread)
    originals.compare(run(mine, lambda weights: weights), original, original, tree)


def rotate(query, key, value):
    """A hook: rotary embeddings of query and key, as Equinox documents it."""
    rope = eqx.nn.RotaryPositionalEmbedding(10, dtype=query.dtype)
    query, key = (jax.vmap(rope, in_axes=1, out_axes=1)(x) for x in (query, key))
    return query, key, value


@DTYPES
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(mask=random_mask(T, S)),
        dict(mask=random_mask(4, T, S)),
        dict(process_heads=rotate),
    ],
    ids=["plain", "mask", "mask of heads", "rotary"],
)
def test_call(make, dtype, options):
    mine, theirs = (m(**SIZES, **BIASES, dtype=dtype, key=KEY) for m in (make, Original))
    compare(mine, theirs, dtype, lambda layer, *arrays: layer(*arrays, **options))


def test_defaults(make):
    """Self-attention, sizes from `query_size`, no biases."""
    (x, _, _) = inputs()
    call = lambda layer, x: layer(x, x, x)  # noqa: E731
    compare(make(3, 6, key=KEY), Original(3, 6, key=KEY), call=call, arrays=(x,))


@DTYPES
def test_same_weights_from_the_same_key(dtype):
    mine, theirs = (
        m(**SIZES, **BIASES, dtype=dtype, key=KEY) for m in (MultiheadAttention, Original)
    )
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
    assert isinstance(mine, Original)


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoint_loads_into_the_other(make, ours_first):
    options = SIZES | BIASES | dict(dropout_p=0.25, inference=True)
    kinds = (make, Original) if ours_first else (Original, make)
    saved, other = (m(**options, key=jax.random.key(i)) for i, m in enumerate(kinds))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, saved)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, other)
    assert type(loaded) is type(other)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (loaded.dropout.p, loaded.dropout.inference) == (0.25, True)
    originals.assert_equal_but_rounding(loaded(*inputs()), saved(*inputs()))


def repeat_heads(group):
    """Weights with as many key and value heads as query heads."""

    def repeat(linear):
        heads = 4 // group
        return jax.tree.map(
            lambda w: jnp.repeat(w.reshape(heads, -1, *w.shape[1:]), group, 0).reshape(
                -1, *w.shape[1:]
            ),
            linear,
        )

    def spread(layer):
        where = lambda layer: (layer.key_proj, layer.value_proj)  # noqa: E731
        return eqx.tree_at(where, layer, tuple(map(repeat, where(layer))))

    return spread


@DTYPES
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_attention(make, dtype, kv_heads):
    """Equals Equinox's with repeated weights; gradients are sums."""
    mine = make(**SIZES, **BIASES, dtype=dtype, num_key_value_heads=kv_heads, key=KEY)
    assert mine.key_proj.weight.shape == (kv_heads * 10, 5)
    assert mine.value_proj.weight.shape == (kv_heads * 11, 3)
    theirs = Original(**SIZES, **BIASES, dtype=dtype, key=KEY)
    compare(mine, theirs, dtype, spread=repeat_heads(4 // kv_heads))


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        (dict(is_causal=True), lambda i, j: j <= i),
        (dict(local_window_size=2), lambda i, j: abs(i - j) <= 2),
        (dict(local_window_size=(3, 2)), lambda i, j: (j >= i - 3) & (j <= i + 2)),
        (dict(local_window_size=(2, None)), lambda i, j: j >= i - 2),
        (dict(is_causal=True, local_window_size=(3, 2)), lambda i, j: (j >= i - 3) & (j <= i)),
    ],
)
def test_causality_and_windows(make, options, visible):
    rules = visible(*np.ogrid[:T, :S])

    def call(layer, *arrays):
        return layer(*arrays, mask=rules if type(layer) is Original else None)

    compare(make(**SIZES, **options, key=KEY), Original(**SIZES, key=KEY), call=call)


@pytest.mark.parametrize("mask", [None, (T, S), (1, 4, T, S), (3, 4, T, S), (3, 1, T, S)], ids=str)
def test_batched(make, mask):
    """Batched calls are Equinox's under `jax.vmap`, the hook's too."""
    mask = mask and random_mask(*mask)

    def call(layer, *arrays):
        if type(layer) is not Original:
            return layer(*arrays, mask=mask, process_heads=rotate)
        own = mask if mask is None or mask.ndim < 4 else np.broadcast_to(mask, (3, 4, T, S))
        axis = 0 if own is not None and own.ndim == 4 else None
        return jax.vmap(
            lambda q, k, v, m: layer(q, k, v, m, process_heads=rotate), (0, 0, 0, axis)
        )(*arrays, own)

    layers = make(**SIZES, key=KEY), Original(**SIZES, key=KEY)
    compare(*layers, call=call, arrays=inputs(batch=(3,)))


def test_mixed_dtypes(make):
    """Inputs of other dtypes promote as in Equinox."""
    mine, theirs = (m(**SIZES, dtype=jnp.bfloat16, key=KEY) for m in (make, Original))
    query, key, value = inputs()
    arrays = (query.astype(jnp.bfloat16), key, value.astype(jnp.bfloat16))
    got, expected = mine(*arrays), theirs(*arrays)
    assert got.dtype == expected.dtype == np.float32
    originals.assert_equal_but_rounding(got, expected, jnp.bfloat16)


def test_rows_without_keys(make):
    """The documented difference: the projection of zeros."""
    mask = random_mask(T, S)
    mask[2] = False
    mine, theirs = (m(**SIZES, **BIASES, key=KEY) for m in (make, Original))
    got, expected = mine(*inputs(), mask=mask), theirs(*inputs(), mask=mask)
    np.testing.assert_array_equal(got[2], mine.output_proj.bias)
    seeing = mask.any(-1)
    originals.assert_equal_but_rounding(got[seeing], expected[seeing])
    assert np.abs(got[2] - expected[2]).max() > 0.01


# Dropout. Of values and output projection that are identities, the output is the probabilities.


def factors(layer, key, **options):
    """What the probabilities of an N-head layer are multiplied by, `[..., T, N, S]`."""
    heads, size = layer.num_heads, 32
    layer = eqx.tree_at(
        lambda x: (x.query_proj.weight, x.value_proj.weight, x.output_proj.weight),
        layer,
        (
            jnp.zeros_like(layer.query_proj.weight),
            jnp.tile(jnp.eye(size), (heads, 1)),
            jnp.eye(heads * size),
        ),
    )
    batch = options.pop("batch", ())
    x = jnp.broadcast_to(jnp.eye(size), (*batch, size, size))
    output = size * np.asarray(layer(x, x, x, key=key, **options))
    return output.reshape(*batch, size, heads, size)


def dropout_layer(make, rate=0.3, heads=2):
    size = dict(qk_size=32, vo_size=32, output_size=heads * 32)
    return make(heads, 32, dropout_p=rate, **size, key=KEY)


def test_dropout(make):
    """As Equinox's: rate, scaling, independent heads, one mask a key."""
    key, other = jax.random.split(jax.random.key(1))
    for kind in (make, Original):
        layer = dropout_layer(kind)
        drawn = factors(layer, key)
        kept = drawn > 0
        np.testing.assert_allclose(drawn[kept], 1 / 0.7, rtol=2**-15)
        first, second = (kept[:, n].ravel() for n in (0, 1))
        for plane in (first, second):
            assert abs(plane.mean() - 0.7) < 5 * np.sqrt(0.3 * 0.7 / plane.size)
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(first.size)
        np.testing.assert_array_equal(factors(layer, key), drawn)
        assert (factors(layer, other) != drawn).any()


def test_dropout_of_a_batch(make):
    """A key for each sequence, those of `jax.random.split`."""
    layer, key = dropout_layer(make), jax.random.key(1)
    drawn = factors(layer, key, batch=(3,))
    assert (drawn[0] != drawn[1]).any()
    for one, own in zip(drawn, jax.random.split(key, 3), strict=True):
        np.testing.assert_array_equal(one, factors(layer, own))


def test_inference(make):
    """Off by constructor, by call, by `inference_mode` and by a rate of 0, as in Equinox."""
    arrays = inputs()
    plain = make(**SIZES, key=KEY)(*arrays)
    layer = make(**SIZES, dropout_p=0.5, key=KEY)
    np.testing.assert_array_equal(layer(*arrays, inference=True), plain)
    np.testing.assert_array_equal(layer(*arrays, key=KEY, inference=True), plain)
    np.testing.assert_array_equal(eqx.nn.inference_mode(layer)(*arrays), plain)
    off = make(**SIZES, dropout_p=0.5, inference=True, key=KEY)
    np.testing.assert_array_equal(off(*arrays), plain)
    assert (off(*arrays, key=KEY, inference=False) != plain).any()
    assert (layer(*arrays, key=KEY) != plain).any()
    with pytest.warns(UserWarning, match="deterministic"):
        np.testing.assert_array_equal(layer(*arrays, deterministic=True), plain)


def test_dropout_without_a_key_raises_as_in_equinox(make):
    for kind in (make, Original):
        layer = kind(**SIZES, dropout_p=0.5, key=KEY)
        with pytest.raises(RuntimeError, match="key"):
            layer(*inputs())


# Under Equinox's transformations.


def stack(make):
    """Three layers in one, made by `eqx.filter_vmap`."""
    return eqx.filter_vmap(lambda key: make(3, 6, dropout_p=0.5, key=key))(jax.random.split(KEY, 3))


def test_scan_over_layers(make):
    """The idiom of Equinox's documentation: arrays are scanned, the rest is combined again."""
    (x, _, _) = inputs()
    mask = np.tri(T, dtype=bool)

    def call(layers, x):
        arrays, rest = eqx.partition(layers, eqx.is_array)

        @eqx.filter_checkpoint
        def step(x, arrays):
            layer = eqx.combine(arrays, rest)
            return x + layer(x, x, x, mask, inference=True), None

        return jax.lax.scan(step, x, arrays)[0]

    compare(stack(make), stack(Original), call=call, arrays=(x,))


def test_ensemble(make):
    """`eqx.filter_vmap` over layers and over keys of dropout equals the loop."""
    (x, _, _) = inputs()
    layers, keys = stack(make), jax.random.split(jax.random.key(2), 3)

    @eqx.filter_jit
    def run(layers, keys):
        call = lambda layer, key: layer(x, x, x, key=key)  # noqa: E731
        return eqx.filter_vmap(call, in_axes=(eqx.if_array(0), 0))(layers, keys)

    outputs = run(layers, keys)
    for i in range(3):
        layer = jax.tree.map(lambda w, i=i: w[i] if eqx.is_array(w) else w, layers)
        originals.assert_equal_but_rounding(outputs[i], layer(x, x, x, key=keys[i]))


def test_training(make):
    """`filter_value_and_grad`, `filter_jit` and `apply_updates` lower a loss."""
    (x, _, _) = inputs(batch=(2,))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(layer):
        return jnp.mean((layer(x, x, x) - x[..., ::-1]) ** 2)

    layer = make(3, 6, is_causal=True, num_key_value_heads=1, key=KEY)
    first, gradients = loss(layer)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradients))
    for _ in range(5):
        _, gradients = loss(layer)
        layer = eqx.apply_updates(layer, jax.tree.map(lambda g: -0.1 * g, gradients))
    assert loss(layer)[0] < first


# What raises.


@pytest.mark.parametrize("kv_heads", [3, 8])
def test_key_value_heads_that_do_not_divide(kv_heads):
    with pytest.raises(ValueError, match=f"num_key_value_heads.*4.*{kv_heads}"):
        MultiheadAttention(**SIZES, num_key_value_heads=kv_heads, key=KEY)


@pytest.mark.parametrize(
    "name",
    [
        "num_heads",
        "num_key_value_heads",
        "query_size",
        "key_size",
        "value_size",
        "output_size",
        "qk_size",
        "vo_size",
    ],
)
@pytest.mark.parametrize(
    ("size", "error", "got"),
    [
        (4.0, TypeError, r"an int, got float 4\.0"),
        ("4", TypeError, "an int, got str '4'"),
        (True, TypeError, "an int, got bool True"),
        (0, ValueError, "1 or more, got 0"),
        (-1, ValueError, "1 or more, got -1"),
    ],
)
def test_wrong_sizes(name, size, error, got):
    with pytest.raises(error, match=f"^{name}: expected {got}$"):
        MultiheadAttention(**{**SIZES, name: size}, key=KEY)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (dict(qk_size=257), ValueError, "qk_size: expected from 1 to 256, got 257"),
        (dict(vo_size=300), ValueError, "vo_size: expected from 1 to 256, got 300"),
        (
            dict(query_size=2000, qk_size=None),
            ValueError,
            "qk_size: expected from 1 to 256, got 500, the default: query_size 2000 // 4",
        ),
        (
            dict(query_size=3, qk_size=None),
            ValueError,
            "qk_size: expected from 1 to 256, got 0, the default: query_size 3 // 4",
        ),
        (dict(dropout_p=1.0), ValueError, "dropout_p: expected a number in [0, 1), got 1.0"),
        (dict(dropout_p=-0.1), ValueError, "dropout_p: expected a number in [0, 1), got -0.1"),
        (dict(dropout_p="0.1"), TypeError, "dropout_p: expected a static real number, got str"),
        (dict(inference=None), TypeError, "inference: expected True or False, got None"),
        (dict(dtype=np.int32), TypeError, "dtype: expected one of bfloat16, float16, float32, "),
        (dict(dtype="nonsense"), TypeError, "dtype: expected one of bfloat16, float16, float32, "),
        (dict(is_causal="yes"), TypeError, "is_causal: expected True or False, got str 'yes'"),
        (dict(local_window_size=-1), ValueError, "local_window_size: expected ints >= 0"),
        (dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size: expected an int or "),
        (dict(local_window_size=1.5), TypeError, "local_window_size: expected static ints >= 0"),
        (dict(implementation="cudnn"), ValueError, 'implementation: expected None, "native" or'),
    ],
)
def test_wrong_constructor_arguments(options, error, said):
    with pytest.raises(error, match=f"^{re.escape(said)}"):
        MultiheadAttention(**{**SIZES, **options}, key=KEY)


def test_dtypes_of_attention_are_constructed(make):
    for dtype in (jnp.bfloat16, "float16", np.float32):
        assert make(**SIZES, dtype=dtype, key=KEY).query_proj.weight.dtype == dtype


@pytest.mark.parametrize(
    ("change", "options", "error", "named"),
    [
        ({0: np.zeros((2, T, 6), np.float32)}, {}, ValueError, "query, key_, value"),
        ({i: np.zeros(6, np.float32) for i in range(3)}, {}, ValueError, "query, key_, value"),
        ({2: np.zeros((S - 1, 3), np.float32)}, {}, ValueError, "value.*length"),
        ({}, dict(mask=np.ones((T, S))), TypeError, "mask.*bool"),
        ({}, dict(mask=np.ones((T, S + 1), bool)), ValueError, "mask"),
        ({}, dict(mask=np.ones((3, T, S), bool)), ValueError, "mask"),
        (
            {},
            dict(process_heads=lambda q, k, v: (q, k[1:], v)),
            ValueError,
            r"process_heads.*\(9, 4, 10\).*\(8, 4, 10\)",
        ),
    ],
)
def test_wrong_arguments(change, options, error, named):
    arrays = [change.get(i, x) for i, x in enumerate(inputs())]
    with pytest.raises(error, match=named):
        MultiheadAttention(**SIZES, key=KEY)(*arrays, **options)


@pytest.mark.parametrize("method", ["__init__", "__call__"])
def test_every_argument_of_equinox_is_there(method):
    """In its place, of its kind, with its default."""
    mine, theirs = (
        inspect.signature(getattr(kind, method)).parameters
        for kind in (MultiheadAttention, Original)
    )
    assert [n for n in mine if n in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert (mine[name].kind, mine[name].default) == (parameter.kind, parameter.default)
    added = [mine[n].kind for n in mine if n not in theirs]
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for kind in added)


def test_equinox_is_optional():
    script = """
        import sys
        sys.modules["equinox"] = None
        try:
            import jaxflash.equinox
        except ModuleNotFoundError as error:
            print(error)
    """
    expected = "jaxflash.equinox needs Equinox: pip install equinox"
    assert run_python(script).strip() == expected
