"""`jaxflash.flax.attention_fn` in Flax's modules, compared with Flax's own attention."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import originals
from calls import bfloat16, normal, run_python
from jaxflash.flax import attention_fn

DTYPES = pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
LIBRARIES = pytest.mark.parametrize("library", ["nnx", "linen"])
FLAX = {"nnx": nnx.dot_product_attention, "linen": linen.dot_product_attention}


@pytest.fixture
def ours(default_implementation):
    return partial(attention_fn, implementation=default_implementation)


def nnx_exact(*args, **kwargs):
    """Flax's own; where there might be dropout, its softmax is in float64 if the numbers are."""
    return nnx.dot_product_attention(*args, **kwargs | dict(dropout_rate=0.5, deterministic=True))


EXACT = {"nnx": nnx_exact, "linen": linen.dot_product_attention}


def inputs(dtype, *shapes):
    rng = np.random.default_rng([sum(shape) for shape in shapes])
    return [normal(rng, shape, dtype) for shape in shapes]


def layer(library, options, call_options, arrays):
    """`(apply, weights)` of a multi-head attention layer: `apply(attention, weights, arrays)`."""
    dtype = arrays[0].dtype
    if library == "nnx":

        def make(attention):
            return nnx.MultiHeadAttention(
                in_features=arrays[0].shape[-1],
                in_kv_features=arrays[-1].shape[-1],
                param_dtype=dtype,
                bias_init=nnx.initializers.normal(),
                attention_fn=attention,
                decode=False,
                rngs=nnx.Rngs(3),
                **options,
            )

        def apply(attention, weights, arrays):
            module = make(attention)
            nnx.update(module, weights)
            return module(*arrays, **call_options)

        return apply, nnx.state(make(attention_fn), nnx.Param)

    def module(attention):
        return linen.MultiHeadDotProductAttention(
            param_dtype=dtype,
            bias_init=linen.initializers.normal(),
            attention_fn=attention,
            **options,
        )

    weights = module(linen.dot_product_attention).init(jax.random.key(3), *arrays, **call_options)
    return lambda a, weights, x: module(a).apply(weights, *x, **call_options), weights


def compare_layers(ours, library, options, call_options, arrays):
    apply, weights = layer(library, options, call_options, arrays)

    def run(attention):
        return lambda tree: apply(attention, tree["weights"], tree["arrays"])

    tree = {"weights": weights, "arrays": arrays}
    originals.compare(run(ours), run(FLAX[library]), run(EXACT[library]), tree)


def padding(*lengths, size):
    """Float mask `[B, 1, size, size]` as `make_attention_mask` makes it; padding sees key 0."""
    tokens = np.arange(size) < np.asarray(lengths)[:, None]
    mask = nnx.make_attention_mask(tokens, tokens)
    return np.maximum(mask, np.eye(1, size, dtype=np.float32))


def random_mask(*shape, dtype=bool):
    mask = np.random.default_rng(len(shape)).random(shape) < 0.5
    mask[..., 0] = True
    return mask.astype(dtype)


X = (2, 7, 6)
CASES = {  # shapes of inputs, arguments of the layer, of the call
    "self-attention": ([X], dict(qkv_features=15, out_features=5), {}),
    "cross-attention": ([X, (2, 9, 4)], {}, {}),
    "no batch axes": ([X[1:]], {}, dict(mask=random_mask(3, 7, 7))),
    "three batch axes": ([(2, 1, 3, 5, 6)], {}, dict(mask=random_mask(2, 1, 3, 3, 5, 5))),
    "padding as float": ([X], {}, dict(mask=padding(7, 4, size=7))),
    "causal mask as float": ([X], {}, dict(mask=nnx.make_causal_mask(np.ones((2, 7))))),
    "mask with any non-zero": ([X], {}, dict(mask=-3 * random_mask(1, 1, 7, 7, dtype=np.int32))),
    "mask of heads": ([X, (2, 9, 6)], {}, dict(mask=random_mask(2, 3, 7, 9))),
    "normalized": ([X], dict(normalize_qk=True), {}),
}


@LIBRARIES
@pytest.mark.parametrize(
    ("dtype", "case"),
    [(np.float32, case) for case in CASES]
    + [(bfloat16(), case) for case in ("cross-attention", "padding as float", "mask of heads")],
)
def test_layer(ours, library, dtype, case):
    shapes, options, call_options = CASES[case]
    options = {"num_heads": 3, "qkv_features": 12, **options}
    compare_layers(ours, library, options, call_options, inputs(dtype, *shapes))


@DTYPES
def test_nnx_causal(ours, dtype):
    compare_layers(ours, "nnx", dict(num_heads=3), dict(is_causal=True), inputs(dtype, X))


@DTYPES
def test_nnx_grouped_heads(ours, dtype):
    options = dict(num_heads=4, num_kv_heads=2, qkv_features=20)
    compare_layers(ours, "nnx", options, dict(mask=random_mask(2, 4, 7, 7)), inputs(dtype, X))


@LIBRARIES
def test_dtype_of_the_computation(ours, library):
    """Float32 weights and inputs, computed in bfloat16."""
    (x,) = inputs(np.float32, X)
    apply, weights = layer(library, dict(num_heads=3, dtype=jnp.bfloat16), {}, [x])
    exact, _ = layer(library, dict(num_heads=3), {}, [x])
    got, theirs, right = (
        np.asarray(run(attention, weights, [x]))
        for run, attention in ((apply, ours), (apply, FLAX[library]), (exact, EXACT[library]))
    )
    originals.assert_as_accurate(got, [theirs], right)


# The function itself: shapes of query, key, value, bias, mask.
SHAPES = {
    "bias": ((2, 5, 4, 6), (2, 9, 4, 6), (2, 9, 4, 6), (2, 4, 5, 9), None),
    "bias of heads": ((2, 5, 4, 6), (2, 9, 4, 6), (2, 9, 4, 6), (1, 4, 1, 9), None),
    "bias and mask of fewer axes": ((2, 5, 4, 6), (2, 9, 4, 6), (2, 9, 4, 6), (4, 5, 9), (5, 9)),
    "value head dim": ((2, 5, 4, 6), (2, 9, 4, 6), (2, 9, 4, 3), None, (2, 1, 5, 9)),
    "two batch axes": (
        (2, 3, 5, 4, 6), (2, 3, 9, 4, 6), (2, 3, 9, 4, 6), (2, 1, 4, 1, 9), (1, 3, 1, 5, 9),
    ),
    "two batch axes, one bias": (
        (2, 3, 5, 4, 6), (2, 3, 9, 4, 6), (2, 3, 9, 4, 6), (1, 1, 4, 5, 9), (5, 9),
    ),
    "no batch axes": ((5, 4, 6), (9, 4, 6), (9, 4, 6), (4, 5, 9), (1, 5, 9)),
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("case", SHAPES)
def test_function(ours, dtype, case):
    """Shapes that Linen's function takes, with the gradient of the bias."""
    *shapes, bias, mask = SHAPES[case]
    arrays = dict(zip(("query", "key", "value"), inputs(dtype, *shapes), strict=True))
    if bias:
        (arrays["bias"],) = inputs(dtype, bias)
    mask = mask and random_mask(*mask)

    def run(attention):
        return lambda arrays: attention(**arrays, mask=mask)

    originals.compare(
        run(ours), run(linen.dot_product_attention), run(linen.dot_product_attention), arrays
    )


@LIBRARIES
def test_promotion(ours, library):
    """Dtypes of query, key and value are promoted, integers too, or cast to `dtype`."""
    (x,) = inputs(np.float32, (2, 5, 4, 6))
    half, whole = x.astype(jnp.bfloat16), np.ones((2, 5, 4, 6), np.int32)
    for arguments, dtype in (
        ((half, x, half), None), ((half, half, whole), None), ((whole, whole, whole), None),
        ((x, x, x), jnp.float16), ((half, half, half), np.float32),
    ):  # fmt: skip
        got, expected = (f(*arguments, dtype=dtype) for f in (ours, FLAX[library]))
        assert got.dtype == expected.dtype
        originals.assert_equal_but_rounding(got, expected, got.dtype)


@DTYPES
def test_softmax_in_float32(ours, dtype):
    arrays = inputs(dtype, *[(2, 5, 4, 6)] * 3)
    got, expected = (
        f(*arrays, force_fp32_for_softmax=True) for f in (ours, linen.dot_product_attention)
    )
    assert got.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(got, ours(*arrays).astype(np.float32))


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, "highest"),
        ("default", "default"),
        (jax.lax.Precision.HIGH, "high"),
        (("highest", jax.lax.Precision.HIGHEST), "highest"),
        ("float32", "highest"),
    ],
)
def test_precision_reaches_the_products(precision, expected):
    (x,) = inputs(np.float32, (2, 5, 4, 6))
    jaxpr = str(jax.make_jaxpr(partial(attention_fn, precision=precision))(x, x, x))
    assert f"precision='{expected}'" in jaxpr


def test_no_precision_keeps_the_users():
    (x,) = inputs(np.float32, (2, 5, 4, 6))
    with jax.default_matmul_precision("tensorfloat32"):
        assert "precision='tensorfloat32'" in str(jax.make_jaxpr(attention_fn)(x, x, x))


def test_options_of_flash_attention(ours):
    """A window by `functools.partial`; Linen, which looks at the signature, passes all it has."""
    (x,) = inputs(np.float32, (1, 8, 6))
    windowed = partial(ours, local_window_size=(2, 0))
    position = np.arange(8)
    distance = position[:, None] - position
    for library, attention in FLAX.items():
        mask = ((distance >= 0) & (distance <= 2))[None, None]
        apply, weights = layer(library, dict(num_heads=3), {}, [x])
        masked, weights = layer(library, dict(num_heads=3), dict(mask=mask), [x])
        originals.assert_equal_but_rounding(
            apply(windowed, weights, [x]), masked(attention, weights, [x])
        )


def test_linen_causal(ours):
    (x,) = inputs(np.float32, X)
    apply, weights = layer("linen", dict(num_heads=3), {}, [x])
    mask = linen.make_causal_mask(x[..., 0])
    masked, _ = layer("linen", dict(num_heads=3), dict(mask=mask), [x])
    got = apply(partial(ours, is_causal=True), weights, [x])
    originals.assert_equal_but_rounding(got, masked(FLAX["linen"], weights, [x]))


def test_rows_without_keys(ours):
    """The documented difference: zeros, not the mean of all values."""
    q, k, v = inputs(np.float32, (2, 5, 4, 6), (2, 9, 4, 6), (2, 9, 4, 6))
    mask = random_mask(2, 4, 5, 9)
    mask[1, 2, 3] = False
    got, theirs = (f(q, k, v, mask=mask) for f in (ours, linen.dot_product_attention))
    assert not got[1, 3, 2].any()
    originals.assert_equal_but_rounding(theirs[1, 3, 2], v[1, :, 2].mean(0))
    seeing = np.moveaxis(mask.any(-1), 1, 2)
    originals.assert_equal_but_rounding(got[seeing], theirs[seeing])


# Decoding with a cache.


@DTYPES
def test_nnx_decoding(ours, dtype):
    """Token by token: in each step as near to float64 as Flax's own, with a mask too."""
    (x,) = inputs(dtype, (2, 5, 6))
    mask = random_mask(2, 1, 1, 5)

    def decode(attention, dtype):
        module = nnx.MultiHeadAttention(
            4, 6, 12, num_kv_heads=2, param_dtype=dtype, attention_fn=attention, decode=True,
            rngs=nnx.Rngs(3),
        )  # fmt: skip
        nnx.update(module, jax.tree.map(lambda w: w.astype(dtype), weights))
        module.init_cache(x.shape, dtype)
        step = nnx.jit(lambda module, token: module(token, mask=mask))
        tokens = [step(module, x[:, i : i + 1].astype(dtype)) for i in range(5)]
        assert module.cache_index[...] == 5
        return np.concatenate(tokens, axis=1)

    weights = nnx.state(
        nnx.MultiHeadAttention(4, 6, 12, num_kv_heads=2, param_dtype=dtype, rngs=nnx.Rngs(3)),
        nnx.Param,
    )
    _check_decoding(decode, ours, "nnx", dtype)


@DTYPES
def test_linen_decoding(ours, dtype):
    (x,) = inputs(dtype, (2, 5, 6))
    mask = random_mask(2, 1, 1, 5)

    def decode(attention, dtype):
        module = linen.MultiHeadDotProductAttention(
            3, qkv_features=12, param_dtype=dtype, attention_fn=attention, decode=True
        )
        cache = module.init(jax.random.key(0), x.astype(dtype))["cache"]
        params = jax.tree.map(lambda w: w.astype(dtype), weights["params"])

        @jax.jit
        def step(cache, token):
            variables = {"params": params, "cache": cache}
            return module.apply(variables, token, mask=mask, mutable=["cache"])

        tokens = []
        for i in range(5):
            token, changed = step(cache, x[:, i : i + 1].astype(dtype))
            cache = changed["cache"]
            tokens.append(token)
        return np.concatenate(tokens, axis=1)

    _, weights = layer("linen", dict(num_heads=3, qkv_features=12), {}, [x])
    _check_decoding(decode, ours, "linen", dtype)


def _check_decoding(decode, ours, library, dtype):
    got, theirs = decode(ours, dtype), decode(FLAX[library], dtype)
    with jax.enable_x64(True):
        exact = decode(EXACT[library], np.float64)
    originals.assert_as_accurate(got, [theirs], exact)


# Dropout.


def factors(attention, rng, shape=(2, 3, 32, 64), rate=0.3, **options):
    """What probabilities are multiplied by, `[B, N, T, S]`, from values that are unit vectors."""
    batch, heads, queries, keys = shape
    zeros = np.zeros((batch, queries, heads, 4), np.float32)
    units = np.broadcast_to(np.eye(keys, dtype=np.float32)[:, None], (batch, keys, heads, keys))
    output = attention(
        zeros,
        np.zeros((batch, keys, heads, 4), np.float32),
        units,
        dropout_rng=rng,
        dropout_rate=rate,
        **options,
    )
    return keys * np.moveaxis(np.asarray(output), 1, 2)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_mask(ours, broadcast):
    """As Flax's: rate, scaling, one mask a key, shared by batch rows and heads or not."""
    rng, other = jax.random.split(jax.random.key(1))
    draws = {}
    for name, attention in (("ours", ours), ("flax", linen.dot_product_attention)):
        drawn = factors(attention, rng, broadcast_dropout=broadcast)
        kept = drawn > 0
        np.testing.assert_allclose(drawn[kept], 1 / 0.7, rtol=2**-15)
        planes = kept.reshape(6, -1)
        deviation = np.sqrt(0.3 * 0.7 / planes.shape[1])
        assert (np.abs(1 - planes.mean(1) - 0.3) < 5 * deviation).all()
        assert (planes == planes[0]).all() == broadcast
        if not broadcast:
            correlations = np.corrcoef(planes)[~np.eye(6, dtype=bool)]
            assert np.abs(correlations).max() < 5 / np.sqrt(planes.shape[1])
        again = factors(attention, rng, broadcast_dropout=broadcast)
        np.testing.assert_array_equal(again, drawn)
        assert (factors(attention, other, broadcast_dropout=broadcast) != drawn).any()
        draws[name] = kept
    assert (draws["ours"] != draws["flax"]).any()  # as documented


@pytest.mark.parametrize("kind", [jax.random.key, jax.random.PRNGKey])
def test_dropout_is_off(ours, kind):
    (x,) = inputs(np.float32, (2, 5, 4, 6))
    expected = ours(x, x, x)
    for options in (
        dict(dropout_rate=0.5, deterministic=True, dropout_rng=kind(0)),
        dict(dropout_rate=0.0, dropout_rng=kind(0)),
        dict(dropout_rate=0.0, dropout_rng=None),
        dict(dropout_rate=0.5, deterministic=True),
    ):
        np.testing.assert_array_equal(ours(x, x, x, **options), expected)
    assert (ours(x, x, x, dropout_rate=0.5, dropout_rng=kind(0)) != expected).any()


@DTYPES
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("batch", [(), (2,), (2, 2)], ids=str)
def test_dropout_gradients(ours, broadcast, batch, dtype):
    """Forward and backward drop the same: the mask that `factors` sees."""
    rng = jax.random.key(7)
    names = ("query", "key", "value")
    shapes = ((*batch, 9, 4, 6), (*batch, 21, 2, 6), (*batch, 21, 2, 5))
    arrays = dict(zip(names, inputs(dtype, *shapes), strict=True))
    folded = int(np.prod(batch, dtype=int))
    drawn = factors(ours, rng, (folded, 4, 9, 21), 0.25, broadcast_dropout=broadcast) > 0
    drawn = drawn.reshape(*batch, 4, 9, 21)
    mask = random_mask(1, 9, 21)

    def mine(arrays):
        return ours(
            **arrays,
            mask=mask,
            dropout_rng=rng,
            dropout_rate=0.25,
            broadcast_dropout=broadcast,
        )

    def dense(arrays):
        key, value = (jnp.repeat(arrays[n], 2, axis=-2) for n in ("key", "value"))
        logits = jnp.einsum("...tnh,...snh->...nts", arrays["query"], key) / 6**0.5
        weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
        weights = jnp.where(drawn, weights / 0.75, 0).astype(value.dtype)
        return jnp.einsum("...nts,...snh->...tnh", weights, value)

    originals.compare(mine, dense, dense, arrays)


@pytest.mark.parametrize("broadcast", [True, False])
def test_sharded_dropout(ours, broadcast):
    """Dealt to devices by batch rows and heads, the same is dropped, and nothing is gathered."""
    devices = jax.devices("cpu")
    assert len(devices) >= 4, "conftest asks for eight devices"
    mesh = Mesh(np.reshape(devices[:4], (2, 2)), ("batch", "heads"))
    (x,) = inputs(np.float32, (4, 1, 9, 2, 6))
    options = dict(dropout_rng=jax.random.key(1), dropout_rate=0.3, broadcast_dropout=broadcast)
    attend = jax.jit(lambda x: ours(x, x, x, **options))
    dealt = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch", None, None, "heads")))
    np.testing.assert_array_equal(attend(dealt), attend(jax.device_put(x, devices[0])))
    assert "all-gather" not in attend.lower(dealt).compile().as_text()


@LIBRARIES
def test_default_layer_with_dropout_trains(ours, library):
    """Nothing but a rate and a key: shared masks, Flax's default."""
    (x,) = inputs(np.float32, X)
    apply, weights = layer(
        library, dict(num_heads=3, dropout_rate=0.5), dict(deterministic=True), [x]
    )
    plain, _ = layer(library, dict(num_heads=3), {}, [x])
    np.testing.assert_array_equal(apply(ours, weights, [x]), plain(ours, weights, [x]))
    if library == "nnx":

        def train(seed):
            module = nnx.MultiHeadAttention(
                3, 6, dropout_rate=0.5, deterministic=False, decode=False, attention_fn=ours,
                rngs=nnx.Rngs(3, dropout=seed),
            )  # fmt: skip
            return nnx.jit(nnx.value_and_grad(lambda module: module(x).sum()))(module)
    else:
        module = linen.MultiHeadDotProductAttention(3, dropout_rate=0.5, attention_fn=ours)

        def train(seed):
            def loss(weights):
                rngs = {"dropout": jax.random.key(seed)}
                return module.apply(weights, x, deterministic=False, rngs=rngs).sum()

            return jax.jit(jax.value_and_grad(loss))(weights)

    losses = [train(seed)[0] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(train(0)[1]))


# What raises.


def refused(x, y):
    raise AssertionError("must not be called")


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        (dict(module=object()), NotImplementedError, "module.*sow_weights"),
        (dict(einsum_dot_general=refused), NotImplementedError, "einsum_dot_general"),
        (dict(qk_attn_weights_einsum=refused), NotImplementedError, "qk_attn_weights_einsum"),
        (dict(attn_weights_value_einsum=refused), NotImplementedError, "attn_weights_value_einsum"),
        (dict(precision=("high", "highest")), NotImplementedError, "precision.*'high', 'highest'"),
        (dict(precision="exact"), NotImplementedError, "precision.*'exact'"),
        (dict(dropout_rate=0.1), ValueError, "dropout_rng.*0.1"),
        (dict(dropout_rate=1.0, dropout_rng=jax.random.key(0)), ValueError, "dropout_rate"),
        (dict(dropout_rate=0.1, dropout_rng=7), TypeError, "dropout_key"),
        (dict(mask=np.ones((2, 4, 5, 8))), ValueError, "mask"),
        (dict(mask=np.ones((1, 1, 2, 4, 5, 5))), ValueError, "mask"),
        (dict(bias=np.ones((2, 3, 5, 5), np.float32)), ValueError, "bias"),
        (dict(input_positions=np.arange(5)), TypeError, "input_positions"),
        (dict(return_residual=True), TypeError, "return_residual.*use flash_attention"),
        (dict(dropout_key=jax.random.key(0)), TypeError, "dropout_key.*use dropout_rng"),
    ],
)
def test_raises(options, error, named):
    (x,) = inputs(np.float32, (2, 5, 4, 6))
    with pytest.raises(error, match=named):
        attention_fn(x, x, x, **options)


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5, 7), (3, 2, 4, 5, 5), (6, 4, 5, 5), (1, 1, 1, 1, 5, 5)]
)
def test_pairs_that_do_not_fit_two_batch_axes_raise(name, shape):
    (x,) = inputs(np.float32, (2, 3, 5, 4, 6))
    expected = re.escape(
        f"{name}: expected a shape broadcastable to [batch..., N, T, S] = (2, 3, 4, 5, 5), "
        f"got {shape}"
    )
    with pytest.raises(ValueError, match=expected):
        attention_fn(x, x, x, **{name: np.ones(shape, np.float32)})


@pytest.mark.parametrize("swapped", ["key", "value"])
def test_batch_axes_that_only_fold_alike_raise(swapped):
    x, y = inputs(np.float32, (2, 3, 5, 4, 6), (3, 2, 5, 4, 6))
    arrays = {"query": x, "key": x, "value": x} | {swapped: y}
    with pytest.raises(ValueError, match=rf"{swapped}.*\(2, 3\).*\(3, 2\)"):
        attention_fn(**arrays)
    with pytest.raises(ValueError, match=r"3, ?2, ?1, ?5, ?5"):
        attention_fn(x, x, x, mask=np.ones((3, 2, 1, 5, 5), bool))


@LIBRARIES
def test_sowing_raises(library):
    (x,) = inputs(np.float32, X)
    apply, weights = layer(library, dict(num_heads=3), dict(sow_weights=True), [x])
    with pytest.raises(NotImplementedError, match="sow_weights"):
        apply(attention_fn, weights, [x])


@LIBRARIES
def test_every_argument_of_flax_is_there(library):
    """With its default, and in its place where both libraries have it in the same."""
    mine = inspect.signature(attention_fn).parameters
    theirs = inspect.signature(FLAX[library]).parameters
    assert {n: p.default for n, p in theirs.items()} == {n: mine[n].default for n in theirs}
    assert list(mine)[:12] == list(theirs)[:12]


# Layers under Flax's own transformations.


def test_nnx_scan_over_layers(ours):
    """`nnx.vmap` makes a stack of layers, `nnx.scan` runs it, remat within."""
    (x,) = inputs(np.float32, X)
    mask = padding(7, 4, size=7)

    def make(attention):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return nnx.MultiHeadAttention(
                3,
                6,
                use_bias=False,
                decode=False,
                attention_fn=attention,
                rngs=rngs,
                keep_rngs=False,
            )

        return stack(nnx.Rngs(5))

    def run(attention):
        def function(tree):
            layers = make(attention)
            nnx.update(layers, tree["weights"])

            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.remat
            def forward(layer, x):
                return x + layer(x, mask=mask, is_causal=True)

            return forward(layers, tree["x"])

        return function

    tree = {"weights": nnx.state(make(ours), nnx.Param), "x": x}
    originals.compare(run(ours), run(nnx.dot_product_attention), run(nnx_exact), tree)


def test_linen_scan_over_layers(ours):
    (x,) = inputs(np.float32, X)
    mask = padding(7, 4, size=7)

    def module(attention):
        class Layer(linen.Module):
            @linen.compact
            def __call__(self, x, _):
                attend = linen.MultiHeadDotProductAttention(
                    3, use_bias=False, attention_fn=attention
                )
                return x + attend(x, mask=mask), None

        stack = linen.scan(
            linen.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return stack()

    def run(attention):
        return lambda tree: module(attention).apply(tree["weights"], tree["x"], None)[0]

    tree = {"weights": module(ours).init(jax.random.key(0), x, None), "x": x}
    own = linen.dot_product_attention
    originals.compare(run(ours), run(own), run(own), tree)


@pytest.mark.parametrize("split", [True, False])
def test_linen_vmap_with_dropout(ours, split):
    """Mapped over inputs, with a dropout key each or one for all."""
    (x,) = inputs(np.float32, (3, 2, 5, 6))
    x[:] = x[:1]
    mapped = linen.vmap(
        linen.MultiHeadDotProductAttention,
        variable_axes={"params": None},
        split_rngs={"params": False, "dropout": split},
    )
    module = mapped(3, dropout_rate=0.5, deterministic=False, attention_fn=ours)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    output, _ = module.init_with_output(rngs, x)
    for other in (1, 2):
        assert (output[0] == output[other]).all() != split


def test_nnx_vmap_over_models(ours):
    """An ensemble, each on its own input, equals its members."""
    (x,) = inputs(np.float32, (3, 2, 5, 6))

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return nnx.MultiHeadAttention(
            3, 6, decode=False, attention_fn=ours, rngs=rngs, keep_rngs=False
        )

    models = make(nnx.Rngs(5))
    outputs = nnx.vmap(lambda model, x: model(x, is_causal=True))(models, x)
    graph, state = nnx.split(models)
    for i in range(3):
        member = nnx.merge(graph, jax.tree.map(lambda w, i=i: w[i], state))
        originals.assert_equal_but_rounding(outputs[i], member(x[i], is_causal=True))


def test_flax_is_optional():
    """Importing jaxflash imports neither library; the wrapper without Flax says what it needs."""
    script = """
        import sys
        import jaxflash
        assert not {"flax", "equinox"} & set(sys.modules), "imported too early"
        sys.modules["flax"] = None
        try:
            import jaxflash.flax
        except ModuleNotFoundError as error:
            print(error)
    """
    assert run_python(script).strip() == "jaxflash.flax needs Flax: pip install flax"
