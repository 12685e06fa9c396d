"""Every JAX transformation, alone and stacked, against the reference or a dense formula in JAX."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
import tolerance
from calls import QKV, Call, Shape, compare, compiled, make_call, normal, run_python, yardstick
from jaxflash import _primitives, flash_attention

TINY = Shape(B=None, T=5, S=6, N=2, K=1, H=4, Hv=3)
MAPPED = 3


def all_arrays():
    """Every array argument of an unbatched call, with a leading axis of examples to map over."""
    rng = np.random.default_rng(0)
    qkv = make_call(Shape(B=MAPPED, T=5, S=6, N=2, K=1, H=4, Hv=3)).arrays
    return {
        **qkv,
        "bias": normal(rng, (MAPPED, 2, 5, 6)),
        "mask": rng.random((MAPPED, 1, 5, 6)) < 0.9,
        "scale": np.array([0.5, 0.3, 0.8], np.float32),
        "sinks": normal(rng, (MAPPED, 2)),
        "query_seq_lengths": np.array([5, 3, 4], np.int32),
        "key_value_seq_lengths": np.array([6, 4, 5], np.int32),
        "query_offset": np.array([2, 0, 1], np.int32),
        "query_segment_ids": np.array(
            [[0, 0, 0, 1, 1], [5, 5, 5, 5, 5], [0, 0, 2, 2, 2]], np.int32
        ),
        "key_value_segment_ids": np.array(
            [[0, 0, 0, 1, 1, 1], [5] * 6, [0, 2, 2, 2, 2, 0]], np.int32
        ),
        "dropout_key": jax.random.split(jax.random.key(0), MAPPED),
    }


OPTIONS = {"is_causal": True, "local_window_size": (4, None), "dropout_rate": 0.2}
NAMES = tuple(all_arrays())
GRADIENTS = ("query", "key", "value", "bias", "sinks", "scale")


def check_vmap(implementation, arrays, mapped, options):
    """The vmap of the gradient and the gradient of the vmap, against the reference in a loop."""
    arrays = {n: x if n in mapped else x[0] for n, x in arrays.items()}
    in_axes = {n: 0 if n in mapped else None for n in arrays}
    names = tuple(n for n in GRADIENTS if n in arrays)

    def example(b):
        own = {n: x[b] if n in mapped else x for n, x in arrays.items()}
        return Call(own, options, seed=b)

    calls = [example(b) for b in range(MAPPED)]
    cotangents = jax.tree.map(lambda *c: np.stack(c), *(c.cotangents for c in calls))
    single = compiled(implementation, names, tuple(sorted(options.items())))

    def attend(differentiable, rest):
        return flash_attention(
            **differentiable, **rest, **options, return_residual=True, implementation=implementation
        )

    @jax.jit
    def both(arrays):
        each = jax.vmap(single, (in_axes, 0))(arrays, cotangents)
        differentiable = {n: arrays[n] for n in names}
        rest = {n: x for n, x in arrays.items() if n not in names}
        axes = ({n: in_axes[n] for n in differentiable}, {n: in_axes[n] for n in rest})
        _, pull = jax.vjp(lambda d: jax.vmap(attend, axes)(d, rest), differentiable)
        return each, pull(cotangents)[0]

    each, total = jax.tree.map(np.asarray, both(arrays))
    for b, call in enumerate(calls):
        compare({n: x[b] for n, x in each.items()}, call)
    for name, gradient in total.items():
        measures = [yardstick("d_" + name, call) for call in calls]
        if name in mapped:
            for b, measure in enumerate(measures):
                tolerance.assert_close(name, gradient[b], measure)
        else:
            tolerance.assert_close(name, gradient, functools.reduce(operator.add, measures))


@pytest.mark.parametrize("alone", NAMES)
def test_vmap_of_one_argument(implementation, alone):
    check_vmap(implementation, all_arrays(), {alone}, OPTIONS)


@pytest.mark.parametrize("shared", [None, *NAMES])
def test_vmap_of_all_arguments_but_one(implementation, shared):
    check_vmap(implementation, all_arrays(), set(NAMES) - {shared}, OPTIONS)


@pytest.mark.parametrize("number", range(8))
def test_vmap_of_random_mixes(implementation, number):
    chosen = np.random.default_rng(number).random(len(NAMES)) < 0.5
    mapped = set(itertools.compress(NAMES, chosen))
    check_vmap(implementation, all_arrays(), mapped, OPTIONS)


def test_vmap_over_other_axes(implementation):
    """Mapped axes in the middle and at the end, outputs too."""
    q, k, v = (all_arrays()[n] for n in QKV)
    attend = functools.partial(flash_attention, implementation=implementation)
    expected = jax.vmap(attend)(q, k, v)
    moved = [np.moveaxis(x, 0, axis) for x, axis in ((q, 2), (k, -1), (v, 1))]
    got = jax.vmap(attend, in_axes=(2, -1, 1), out_axes=2)(*moved)
    np.testing.assert_allclose(jnp.moveaxis(got, 2, 0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "axes",
    [
        ((0, 0, 0), (0, 0, 0)),
        ((0, None, None), (0, 0, 0)),
        ((None, 0, 0), (0, None, 0)),
        ((0, 0, None), (None, 0, 0)),
    ],
    ids=str,
)
def test_nested_vmap(implementation, axes, batched):
    """Two mapped axes over unbatched and over batched calls, forward and gradient."""
    outer, inner = axes
    rng = np.random.default_rng(0)
    batch = (2,) if batched else ()
    shapes = ((5, 2, 4), (6, 1, 4), (6, 1, 3))
    arrays = []
    for shape, o, i in zip(shapes, outer, inner, strict=True):
        leading = (3,) * (o is not None) + (2,) * (i is not None)
        arrays.append(normal(rng, (*leading, *batch, *shape)))
    cotangent = normal(rng, (3, 2, *batch, 5, 2, 3))

    def attend(q, k, v):
        return flash_attention(q, k, v, is_causal=True, implementation=implementation)

    def per_example(q, k, v, c):
        output, pull = jax.vjp(attend, q, k, v)
        return output, *pull(c)

    mapped = jax.vmap(jax.vmap(per_example, (*inner, 0)), (*outer, 0))
    output, *gradients = jax.jit(mapped)(*arrays, cotangent)
    for a, b in np.ndindex(3, 2):
        own = []
        for x, o, i in zip(arrays, outer, inner, strict=True):
            x = x if o is None else x[a]
            own.append(x if i is None else x[b])
        call = Call(dict(zip(QKV, own, strict=True)), {"is_causal": True})
        call.cotangents = (cotangent[a, b], np.zeros_like(cotangent[a, b, ..., 0]))
        got = dict(
            zip(("output", "d_query", "d_key", "d_value"), (output, *gradients), strict=True)
        )
        compare({n: np.asarray(x[a, b]) for n, x in got.items()}, call)


def test_five_levels_of_vmap(implementation):
    """More mapped axes than any kernel has batch dimensions, mapped in turns."""
    rng = np.random.default_rng(0)
    q, k, v = (
        normal(rng, (2, 3, 2, 5, 2, 4)),
        normal(rng, (2, 2, 6, 2, 4)),
        normal(rng, (2, 6, 2, 3)),
    )
    axes = [(0, None, None), (None, 0, None), (0, None, None), (None, None, 0), (0, 0, None)]
    attend = functools.partial(flash_attention, implementation=implementation)

    def loss(q, k, v):
        mapped = attend
        for in_axes in reversed(axes):
            mapped = jax.vmap(mapped, in_axes)
        return mapped(q, k, v)

    output, pull = jax.vjp(jax.jit(loss), q, k, v)
    cotangent = normal(rng, output.shape)
    gradients = pull(cotangent)
    expected = [np.zeros_like(x) for x in (q, k, v)]
    for a, b, c, d, e in np.ndindex(2, 2, 3, 2, 2):
        call = Call({"query": q[a, c, e], "key": k[b, e], "value": v[d]})
        call.cotangents = (cotangent[a, b, c, d, e], np.zeros((5, 2), np.float32))
        result = call.reference(reference.exact(np.float32))
        np.testing.assert_allclose(output[a, b, c, d, e], result["output"], atol=2e-6)
        for total, index, name in zip(expected, ((a, c, e), (b, e), (d,)), QKV, strict=True):
            total[index] += result["d_" + name]
    for got, total in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, total, atol=2e-5)


# Differentiation beyond one reverse pass: against a dense formula that JAX differentiates.


def dense(q, k, v, bias, sinks, scale, cap=None, mask=None):
    """Unbatched attention in plain jax.numpy, output and log-sum-exp."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = scale * jnp.einsum("tnh,snh->nts", q, k, precision="highest")
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    logits = logits + bias
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:2], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([logits, column], -1), -1)
    weights = jnp.exp(logits - lse[..., None])
    return jnp.einsum("nts,snh->tnh", weights, v, precision="highest"), lse.T


def dense_arguments():
    arrays = all_arrays()
    return tuple(arrays[n][0] for n in (*QKV, "bias", "sinks", "scale"))


MASK = np.tril(np.ones((5, 6), bool), 2)[None]


def flash(implementation, q, k, v, bias, sinks, scale):
    return flash_attention(
        q,
        k,
        v,
        bias,
        MASK,
        sinks=sinks,
        scale=scale,
        logits_soft_cap=2.0,
        return_residual=True,
        implementation=implementation,
    )


def plain(*arguments):
    return dense(*arguments, cap=2.0, mask=MASK)


def check_transform(implementation, transform):
    """The transform of flash attention against those of the dense formula in 64 and 32 bits."""
    arguments = dense_arguments()
    got = jax.jit(transform(functools.partial(flash, implementation)))(*arguments)
    formula = jax.jit(transform(plain))
    working = [jax.tree.map(np.asarray, formula(*jittered(arguments, s))) for s in range(5)]
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in arguments]
        exact = jax.tree.map(np.asarray, jax.jit(transform(plain))(*wide))
    scale = max(np.abs(x).max() for x in jax.tree.leaves(exact))
    assert scale > 1e-3, "a result of 0 would prove nothing"

    def check(got, exact, *working):
        f32 = np.dtype(np.float32)
        yardstick = tolerance.Yardstick(exact, working, scale, storage=f32, compute=f32)
        tolerance.assert_close("result", got, yardstick)

    jax.tree.map(check, got, exact, *working)
    return exact


def jittered(arguments, seed):
    """Each number moved up or down by an ulp (seed 0: not at all), as rounding does."""
    rng = np.random.default_rng(seed)
    eps = np.finfo(np.float32).eps * (seed > 0)
    return [
        x * (1 + np.float32(eps) * rng.choice([-1, 1], x.shape).astype(x.dtype)) for x in arguments
    ]


def directions(arguments):
    rng = np.random.default_rng(5)
    return tuple(normal(rng, x.shape, x.dtype) for x in arguments)


def loss_of(attend):
    """A scalar with curvature in every argument, through both results."""

    def loss(*arguments):
        output, lse = attend(*arguments)
        return (jnp.sin(output) * (1 + output)).sum() + (lse**2).sum()

    return loss


ALL = tuple(range(6))


def test_the_dense_formula_is_the_reference(implementation):
    exact = check_transform(implementation, lambda f: f)
    q, k, v, bias, sinks, scale = dense_arguments()
    result = reference.attention(q, k, v, bias, MASK, sinks=sinks, scale=scale, logits_soft_cap=2.0)
    np.testing.assert_allclose(exact[0], result["output"], atol=1e-12)
    np.testing.assert_allclose(exact[1], result["lse"], atol=1e-12)


def push(f, *arguments):
    """The tangents of f's results along fixed directions."""
    return jax.jvp(f, arguments, directions(arguments))[1]


def gradients_of(f):
    return jax.grad(loss_of(f), ALL)


def squares(tree):
    return sum((x**2).sum() for x in jax.tree.leaves(tree))


def linearized(f, *arguments):
    return jax.linearize(f, *arguments)[1](*directions(arguments))


TRANSFORMS = {
    "grad": gradients_of,
    "value_and_grad": lambda f: jax.value_and_grad(loss_of(f), ALL),
    "jvp": lambda f: functools.partial(push, f),
    "jacrev": lambda f: jax.jacrev(f, ALL),
    "jacfwd": lambda f: jax.jacfwd(f, ALL),
    "linearize": lambda f: functools.partial(linearized, f),
    "hessian": lambda f: jax.hessian(loss_of(f), ALL),
    "grad of grad": lambda f: jax.grad(lambda *a: squares(gradients_of(f)(*a)), ALL),
    "jvp of grad": lambda f: functools.partial(push, gradients_of(f)),
    "grad of jvp": lambda f: jax.grad(lambda *a: squares(push(f, *a)), ALL),
    "jvp of jvp": lambda f: functools.partial(push, functools.partial(push, f)),
    "third order": lambda f: functools.partial(push, functools.partial(push, gradients_of(f))),
    "grad of checkpointed grad": lambda f: jax.grad(
        lambda *a: squares(gradients_of(jax.checkpoint(f))(*a)), ALL
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(implementation, name):
    check_transform(implementation, TRANSFORMS[name])


@pytest.mark.parametrize("name", ["jvp", "hessian", "third order"])
def test_derivatives_where_logit_max_lags_behind(implementation, name, monkeypatch):
    """As CUDA kernels leave residuals where a row's maximum comes late: only their sum counts."""
    forward = _primitives._forward

    def lagging(config, operands):
        output, logit_max, log_sum = forward(config, operands)
        reference = logit_max - 5
        return output, reference, log_sum + (logit_max - reference)

    monkeypatch.setattr(_primitives, "_forward", lagging)
    check_transform(implementation, TRANSFORMS[name])


@pytest.mark.parametrize("size", [1e3, 1e8, 1e20])
def test_derivatives_of_huge_equal_logits(implementation, size):
    """Kernels and compilers round them each in its way: probabilities are 1 / S all the same."""
    S = 64
    rng = np.random.default_rng(2)
    query = rng.standard_normal((3, 1, 8), np.float32) * np.float32(size)
    key = np.broadcast_to(rng.standard_normal((1, 1, 8), np.float32), (S, 1, 8))
    value = np.zeros((S, 1, 8), np.float32)

    def attend(value):
        return flash_attention(query, key, value, scale=1.0, implementation=implementation)

    _, tangent = jax.jvp(attend, (value,), (np.ones_like(value),))
    np.testing.assert_allclose(tangent, 1, rtol=S * np.finfo(np.float32).eps)


@pytest.mark.parametrize("argument", range(6), ids=[*QKV, "bias", "sinks", "scale"])
def test_jvp_of_one_argument(implementation, argument):
    """Tangents that are symbolically zero are left out, and the others are right."""

    def transform(f):
        def run(*arguments):
            def alone(x):
                return f(*arguments[:argument], x, *arguments[argument + 1 :])

            return push(alone, arguments[argument])

        return run

    check_transform(implementation, transform)


@pytest.mark.parametrize("inner", ["jvp", "grad", "hessian-vector product"])
@pytest.mark.parametrize(
    "mapped", [("query",), ("key", "bias"), (*QKV, "bias", "sinks", "scale")], ids="-".join
)
def test_vmap_of_derivatives(implementation, inner, mapped):
    arrays = all_arrays()
    names = (*QKV, "bias", "sinks", "scale")
    in_axes = tuple(0 if n in mapped else None for n in names)
    arguments = tuple(arrays[n] if n in mapped else arrays[n][0] for n in names)
    attend = functools.partial(flash, implementation)
    derive = {
        "jvp": functools.partial(push, attend),
        "grad": gradients_of(attend),
        "hessian-vector product": functools.partial(push, gradients_of(attend)),
    }[inner]
    got = jax.jit(jax.vmap(derive, in_axes))(*arguments)
    single = jax.jit(derive)
    for b in range(MAPPED):
        own = [x[b] if axis == 0 else x for x, axis in zip(arguments, in_axes, strict=True)]
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(single(*own)), strict=True):
            np.testing.assert_allclose(x[b], y, rtol=1e-4, atol=1e-5 * float(jnp.abs(y).max()))


def test_jvp_past_the_lengths_and_of_empty_rows(implementation):
    """NaN tangents of what does not exist, and empty rows: tangents are finite, empty ones 0."""
    call = make_call(
        TINY,
        query_seq_lengths=np.array(4),
        key_value_seq_lengths=np.array(3),
        query_offset=np.array(-1),
    )
    rng = np.random.default_rng(0)
    primals = tuple(call.arrays[n] for n in QKV)
    tangents = tuple(normal(rng, x.shape) for x in primals)

    def attend(q, k, v):
        return flash_attention(
            q,
            k,
            v,
            **{n: x for n, x in call.arrays.items() if n not in QKV},
            is_causal=True,
            return_residual=True,
            implementation=implementation,
        )

    _, clean = jax.jvp(attend, primals, tangents)
    for x, length in zip((*primals, *tangents), (4, 3, 3) * 2, strict=True):
        x[length:] = np.nan
    _, spoilt = jax.jvp(attend, primals, tangents)
    for a, b in zip(clean, spoilt, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()
        assert not a[0].any()
        assert not a[4:].any()
        assert a[1:4].any()


def test_b89_integers_and_bools_get_float0(implementation):
    arrays = {n: x[0] for n, x in all_arrays().items()}
    integers = {
        n: arrays[n] for n in ("mask", "query_seq_lengths", "query_offset", "query_segment_ids")
    }
    rest = {n: x for n, x in arrays.items() if n not in integers}

    def attend(integers):
        return flash_attention(**rest, **integers, **OPTIONS, implementation=implementation)

    output, pull = jax.vjp(attend, integers)
    for cotangent in pull(output)[0].values():
        assert cotangent.dtype == jax.dtypes.float0


# Control flow


def attend_masked(implementation, x, ids, mask):
    return flash_attention(
        x,
        x,
        x,
        mask=mask,
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        implementation=implementation,
    )


def control_flow_inputs():
    rng = np.random.default_rng(0)
    x = normal(rng, (5, 2, 4))
    ids = np.array([0, 0, 1, 1, 1], np.int32)
    mask = np.tril(np.ones((1, 5, 5), bool))
    return jnp.asarray(x), jnp.asarray(ids), jnp.asarray(mask)


def unrolled(implementation, steps):
    def loss(x, ids, mask):
        for step in range(steps):
            x = x + attend_masked(implementation, x, ids + step, mask)
        return (x**2).sum()

    return loss


def scanned(implementation, steps):
    def loss(x, ids, mask):
        def body(carry, step):
            x, ids, mask = carry
            return (x + attend_masked(implementation, x, ids + step, mask), ids, mask), None

        (x, _, _), _ = jax.lax.scan(body, (x, ids, mask), jnp.arange(steps))
        return (x**2).sum()

    return loss


def test_b89_scan_with_ids_and_mask_in_the_carry(implementation):
    inputs = control_flow_inputs()
    expected = jax.value_and_grad(unrolled(implementation, 3))(*inputs)
    got = jax.jit(jax.value_and_grad(scanned(implementation, 3)))(*inputs)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_b89_no_tracer_leaks(implementation):
    inputs = control_flow_inputs()
    with jax.checking_leaks():
        jax.jit(jax.value_and_grad(scanned(implementation, 2)))(*inputs)
        jax.vmap(jax.grad(scanned(implementation, 2)), (0, None, None))(
            jnp.stack([inputs[0]] * 2), *inputs[1:]
        )


def test_b89_cond(implementation):
    x, ids, mask = control_flow_inputs()

    @jax.jit
    @jax.value_and_grad
    def loss(x, masked):
        branches = (
            lambda x: flash_attention(x, x, x, implementation=implementation),
            lambda x: attend_masked(implementation, x, ids, mask),
        )
        return (jax.lax.cond(masked, branches[1], branches[0], x) ** 2).sum()

    for masked in (False, True):
        branch_mask = mask & (ids[:, None] == ids) if masked else None
        direct = jax.value_and_grad(
            lambda x, m=branch_mask: (
                flash_attention(x, x, x, mask=m, implementation=implementation) ** 2
            ).sum()
        )(x)
        for a, b in zip(loss(x, masked), direct, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_while_loop_with_traced_lengths(implementation):
    """Forward in a loop of unknown length, as in generation; the length is the carry."""
    x, _, _ = control_flow_inputs()

    @jax.jit
    def run(x, last):
        def step(carry):
            length, total = carry
            output = flash_attention(
                x, x, x, key_value_seq_lengths=length, implementation=implementation
            )
            return length + 1, total + output

        return jax.lax.while_loop(lambda c: c[0] <= last, step, (jnp.int32(1), jnp.zeros_like(x)))[
            1
        ]

    expected = sum(
        flash_attention(x, x[:n], x[:n], implementation=implementation) for n in (1, 2, 3, 4)
    )
    np.testing.assert_allclose(run(x, 4), expected, rtol=1e-5, atol=1e-6)


def test_map_with_batch_size(implementation):
    q, k, v = (all_arrays()[n] for n in QKV)
    attend = functools.partial(flash_attention, implementation=implementation)
    got = jax.lax.map(lambda a: attend(*a), (q, k, v), batch_size=2)
    np.testing.assert_allclose(got, jax.vmap(attend)(q, k, v), rtol=1e-5, atol=1e-6)


# Rematerialisation, donation, debugging


SAVED_NAMES = ("flash_attention_output", "flash_attention_lse")


def layer(implementation, w, x):
    q, k, v = (jnp.tanh(jnp.matmul(x, w[i], precision="highest")) for i in range(3))
    return x + flash_attention(q, k, v, is_causal=True, implementation=implementation)


def grad_with_policy(implementation, policy):
    step = jax.checkpoint(functools.partial(layer, implementation), policy=policy)
    return jax.jit(jax.grad(lambda w, x: (step(w, x) ** 2).sum()))


POLICIES = {
    "names": jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


def layer_inputs():
    rng = np.random.default_rng(0)
    return normal(rng, (3, 4, 4)), normal(rng, (2, 5, 2, 4))


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_policies(implementation, policy):
    w, x = layer_inputs()
    expected = jax.grad(lambda w: (layer(implementation, w, x) ** 2).sum())(w)
    got = grad_with_policy(implementation, POLICIES[policy])(w, x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("policy", "forwards"), [("names", 1), ("nothing", 2), ("everything", 1)])
def test_b94_checkpoint_names_save_the_forward_kernel(native, policy, forwards):
    """With the two names saved the forward kernel runs once, without them twice."""
    text = grad_with_policy(native, POLICIES[policy]).lower(*layer_inputs()).compile().as_text()
    assert text.count('custom_call_target="jaxflash_forward"') == forwards
    assert text.count('custom_call_target="jaxflash_backward"') == 1


def test_offloaded_output_in_a_scan_of_layers(implementation):
    """The output waits in the host's memory for the backward pass; the forward runs once."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["flash_attention_lse"],
        names_which_can_be_offloaded=["flash_attention_output"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    w, x = layer_inputs()
    stacked = np.stack([w, 0.5 * w])

    def gradient(policy):
        step = jax.checkpoint(functools.partial(layer, implementation), policy=policy)

        def loss(stacked):
            return (jax.lax.scan(lambda x, w: (step(w, x), None), x, stacked)[0] ** 2).sum()

        return jax.jit(jax.grad(loss))

    offloaded = gradient(policy)
    np.testing.assert_allclose(offloaded(stacked), gradient(None)(stacked), rtol=1e-5, atol=1e-5)
    if implementation == "native":
        text = offloaded.lower(stacked).compile().as_text()
        assert text.count('custom_call_target="jaxflash_forward"') == 1


def test_gradient_runs_each_kernel_once(native):
    w, x = layer_inputs()
    loss = jax.jit(jax.grad(lambda w: (layer(native, w, x) ** 2).sum()))
    text = loss.lower(w).compile().as_text()
    assert text.count('custom_call_target="jaxflash_forward"') == 1
    assert text.count('custom_call_target="jaxflash_backward"') == 1


def test_n01_donated_arguments(implementation):
    """A training step that gives its parameters away computes what one that keeps them does."""
    arrays = [jnp.asarray(x) for x in make_call(Shape(T=9, S=9, N=2)).arrays.values()]

    def step(q, k, v):
        gradients = jax.grad(
            lambda a: (flash_attention(*a, implementation=implementation) ** 2).sum()
        )((q, k, v))
        return tuple(x - 0.1 * g for x, g in zip((q, k, v), gradients, strict=True))

    expected = jax.jit(step)(*arrays)
    donated = jax.jit(step, donate_argnums=(0, 1, 2))
    copies = [x.copy() for x in arrays]
    got = donated(*copies)
    assert all(x.is_deleted() for x in copies)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_disable_jit(implementation):
    call = make_call(TINY, is_causal=True)
    expected = call.check(implementation)
    with jax.disable_jit():
        got = compiled(implementation, QKV, (("is_causal", True),))(call.arrays, call.cotangents)
    for name, value in got.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


def test_eager_equals_jit(implementation):
    arrays = {n: x[0] for n, x in all_arrays().items()}
    attend = functools.partial(flash_attention, **OPTIONS, implementation=implementation)
    np.testing.assert_allclose(attend(**arrays), jax.jit(attend)(**arrays), rtol=1e-5, atol=1e-6)


def test_debug_nans(implementation):
    """Empty rows, lengths and dropout make no NaN on the way either."""
    arrays = {n: x[0] for n, x in all_arrays().items()}
    arrays["query_offset"] = np.int32(-2)
    del arrays["sinks"]
    call = Call(arrays, OPTIONS)
    with jax.debug_nans(True):
        got = call.flash(implementation)
        flash_attention(**arrays, **OPTIONS, implementation=implementation)
    assert np.isneginf(got["lse"]).any()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_debug_nans_finds_the_operation(implementation, wrap):
    huge = np.full((4, 2, 4), 1e30, np.float32)

    def attend(query):
        return flash_attention(query, huge, huge, implementation=implementation).sum()

    found = pytest.raises(FloatingPointError, match="in flash_attention_forward")
    with jax.debug_nans(True), found:
        wrap(attend)(huge)


@pytest.mark.parametrize("mask", [None, np.zeros((1, 1, 6), bool)], ids=["seen", "unseen"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_debug_infs(implementation, mask, wrap):
    """No infinity leaves any operation, though a row that sees no key has one as its statistic."""
    arrays = make_call(TINY).arrays

    def attend(arrays):
        return flash_attention(
            **arrays, mask=mask, is_causal=True, implementation=implementation
        ).sum()

    with jax.debug_infs(True):
        wrap(jax.grad(attend))(arrays)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.enable_checks(True),
    ],
    ids=["rank promotion", "dtype promotion", "checks"],
)
def test_strict_settings_change_nothing(implementation, setting):
    arrays = {n: x[0] for n, x in all_arrays().items()}

    def run():
        def attend(floats):
            return flash_attention(**{**arrays, **floats}, **OPTIONS, implementation=implementation)

        floats = {n: arrays[n] for n in (*QKV, "bias", "scale", "sinks")}
        output, pull = jax.vjp(attend, floats)
        return output, pull(output), jax.jvp(attend, (floats,), (floats,))

    expected = run()
    with setting():
        got = run()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_remat_of_scan_of_layers(implementation):
    """The usual transformer: a scan over checkpointed layers."""
    w, x = layer_inputs()
    stacked = np.stack([w, 0.5 * w])

    def loss(stacked, scan):
        if scan:
            step = jax.checkpoint(lambda x, w: (layer(implementation, w, x), None))
            return (jax.lax.scan(step, x, stacked)[0] ** 2).sum()
        return (layer(implementation, stacked[1], layer(implementation, stacked[0], x)) ** 2).sum()

    got = jax.jit(jax.grad(lambda s: loss(s, True)))(stacked)
    expected = jax.jit(jax.grad(lambda s: loss(s, False)))(stacked)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stopped", QKV)
def test_stop_gradient(implementation, stopped):
    call = make_call(TINY)
    expected = call.check(implementation)
    d_output, d_lse = call.cotangents

    def attend(arrays):
        arrays = {**arrays, stopped: jax.lax.stop_gradient(arrays[stopped])}
        return flash_attention(**arrays, return_residual=True, implementation=implementation)

    gradients = jax.vjp(attend, call.arrays)[1]((d_output, d_lse))[0]
    for name, gradient in gradients.items():
        want = 0 * expected["d_" + name] if name == stopped else expected["d_" + name]
        np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-6)


PMAP = """
    import os, sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import numpy as np
    import jax
    from jaxflash import flash_attention

    def loss(x):
        return (flash_attention(x, x, x, is_causal=True, implementation=sys.argv[1]) ** 2).sum()

    x = np.random.default_rng(0).standard_normal((2, 1, 9, 2, 8), np.float32)
    run = jax.value_and_grad(loss)
    for got, want in zip(jax.pmap(run)(x), jax.vmap(run)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    print("done")
"""


def test_b97_pmap(implementation):
    """On two host devices, in a process of its own."""
    assert run_python(PMAP, implementation).strip() == "done"
