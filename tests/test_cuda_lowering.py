"""Programs lowered for CUDA: what is called with which attributes. Needs the module, but no GPU."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calls import Call, Shape, make_call, normal
from jaxflash import __main__ as command
from jaxflash import _choice, _modules, _platforms, flash_attention
from test_compile import export

pytestmark = pytest.mark.skipif(
    _modules.MODULES["cuda"].reason is not None, reason=str(_modules.MODULES["cuda"].reason)
)


def lowered(call, gradients=True, implementation="native"):
    """The program of the call, lowered for CUDA."""

    def attend(arrays):
        return flash_attention(**arrays, **call.options, implementation=implementation)

    def loss(arrays):
        return attend(arrays).astype(jnp.float32).sum()

    def gradient(arrays):
        return jax.grad(loss, allow_int=True)(arrays)

    return lower_for_cuda(gradient if gradients else attend, call.arrays)


def lower_for_cuda(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def attributes(text, target):
    """The attributes of a custom call by name, as MLIR writes them."""
    (line,) = [line for line in text.splitlines() if f"@{target}(" in line]
    (config,) = re.findall(r"mhlo\.backend_config = \{([^}]*)\}", line)
    return dict(re.findall(r"(\w+) = ([^,]+)", config))


def results(text, target):
    """The types of a custom call's results, as MLIR writes them."""
    (line,) = [line for line in text.splitlines() if f"@{target}(" in line]
    return re.findall(r"tensor<([^>]*)>", line.rpartition("->")[2])


def test_both_calls_and_their_attributes():
    call = make_call(Shape(T=9, S=21), is_causal=True, logits_soft_cap=2.0)
    text = lowered(call)
    common = {
        "window_left": "-1 : i64",
        "window_right": "0 : i64",
        "soft_cap": "2.000000e+00 : f64",
        "dropout_threshold": "0 : i64",
        "precision": "0 : i64",
    }
    assert attributes(text, "jaxflash_forward") == common
    assert attributes(text, "jaxflash_backward") == common | {"deterministic": "0 : i64"}


@pytest.mark.parametrize(
    ("precision", "tf32"),
    [
        (None, False),
        ("highest", False),
        ("float32", False),
        ("BF16_BF16_F32_X3", False),
        ("TF32_TF32_F32_X3", False),
        ("high", True),
        ("default", True),
        ("bfloat16", True),
        ("tensorfloat32", True),
        ("TF32_TF32_F32", True),
    ],
)
def test_tf32_only_where_it_is_asked_for(precision, tf32):
    with jax.default_matmul_precision(precision):
        text = lowered(make_call(Shape(T=9, S=21)))
    for target in ("jaxflash_forward", "jaxflash_backward"):
        assert attributes(text, target)["precision"] == f"{int(tf32)} : i64"


def test_workspaces_are_results_of_bytes():
    """One head and many keys are split: partial outputs of every split; sums of d_query."""
    text = lowered(make_call(Shape(B=1, T=64, S=4096, N=1, H=64)))
    *_, forward = results(text, "jaxflash_forward")
    *_, backward = results(text, "jaxflash_backward")
    sizes = [int(re.fullmatch(r"(\d+)xui8", size)[1]) for size in (forward, backward)]
    assert all(size >= 4 * 64 * 64 for size in sizes)


def test_absent_operands_and_unwanted_results_are_empty():
    call = make_call(Shape(T=9, S=21))

    def loss(query):
        return flash_attention(**{**call.arrays, "query": query}, implementation="native").sum()

    text = lower_for_cuda(jax.grad(loss), call.arrays["query"])
    query, key, value, bias, scale, _ = results(text, "jaxflash_backward")
    assert query == "2x9x2x16xf32"
    assert key == value == bias == scale == "0xui8"


def test_a_float64_bias_reaches_the_kernels_as_float32():
    with jax.enable_x64(True):
        call = make_call(Shape(T=9, S=21), bias=lambda rng: normal(rng, (2, 2, 9, 21), np.float64))
        text = lowered(call)
        assert results(text, "jaxflash_backward")[3] == "2x2x9x21xf32"
        assert "tensor<2x2x9x21xf64>" in text


def limited(name):
    """A call that is right, but not by the CUDA kernels: the call, and words of the reason."""
    full, broadcast = (lambda rng, s=s: normal(rng, s) for s in ((2, 2, 9, 21), (1, 2, 9, 21)))
    return {
        "float64": (make_call(Shape(T=9, S=21), np.float64), "float64"),
        "deterministic broadcast bias": (
            make_call(Shape(T=9, S=21), bias=broadcast, deterministic_gradients=True),
            "deterministic_gradients",
        ),
        "deterministic full bias": (
            make_call(Shape(T=9, S=21), bias=full, deterministic_gradients=True),
            None,
        ),
    }[name]


def test_float64_is_not_for_the_kernels():
    with jax.enable_x64(True):
        call, reason = limited("float64")
        with pytest.raises(NotImplementedError, match=f"cuda.*{reason}"):
            lowered(call)
        with pytest.warns(RuntimeWarning, match=reason):
            text = lowered(call, implementation=None)
    assert "jaxflash_" not in text


def test_deterministic_gradients_of_a_broadcast_bias_are_not_for_the_kernels():
    """The backward pass alone is left to `xla`."""
    call, reason = limited("deterministic broadcast bias")
    with pytest.raises(NotImplementedError, match=f"cuda.*{reason}"):
        lowered(call)
    assert "jaxflash_forward" in lowered(call, gradients=False)
    with pytest.warns(RuntimeWarning, match=reason):
        text = lowered(call, implementation=None)
    assert "jaxflash_forward" in text
    assert "jaxflash_backward" not in text


def test_other_deterministic_gradients_are():
    text = lowered(limited("deterministic full bias")[0])
    assert attributes(text, "jaxflash_backward")["deterministic"] == "1 : i64"


def test_export_for_both_platforms():
    """One program for CPU and CUDA with the calls of each; made here, run on whichever is there."""
    call = make_call(Shape(T=9, S=21), is_causal=True)

    def run(arrays):
        return flash_attention(**arrays, **call.options, implementation="native")

    exported = export(
        jax.jit(run), jax.tree.map(jnp.asarray, call.arrays), platforms=["cpu", "cuda"]
    )
    lines = [line for line in exported.mlir_module().splitlines() if "@jaxflash_forward(" in line]
    assert sorted("precision" in line for line in lines) == [False, True]
    np.testing.assert_allclose(exported.call(call.arrays), jax.jit(run)(call.arrays), rtol=1e-6)


SIZES = [
    Shape(B=1, T=1, S=5000, N=1, H=256),
    Shape(B=1, T=5000, S=1, N=1, H=8),
    Shape(B=300, T=300, S=3000, N=8, K=1, H=96, Hv=40),
    Shape(B=400, T=1290, S=650, N=16, K=2, H=130),
    Shape(B=64, T=4096, S=4096, N=16, H=128),
    Shape(B=200, T=1270, S=1290, N=3, H=160),
    Shape(B=100, T=1270, S=1290, N=4, H=64, Hv=192),
    Shape(B=1_000_000, T=16, S=16, N=7, H=64),
    Shape(B=1, T=1 << 16, S=1 << 16, N=4, H=128),
]
WORKSPACE_FEATURES = {
    "plain": {},
    "causal, deterministic": {"is_causal": True, "deterministic_gradients": True},
    "bias of the keys": {"bias": lambda s: ((1, s.N, 1, s.S), "float32")},
    "bias of the rows": {"bias": lambda s: ((1, s.N, s.T, 1), "float32")},
    "mask": {"mask": lambda s: ((s.B, s.N, s.T, s.S), "bool")},
    "mask of all heads": {"mask": lambda s: ((1, 1, s.T, s.S), "bool")},
    "mask of the keys": {"mask": lambda s: ((1, 1, 1, s.S), "bool")},
    "ids": {
        "query_segment_ids": lambda s: ((s.B, s.T), "int32"),
        "key_value_segment_ids": lambda s: ((s.B, s.S), "int32"),
    },
}


def types_of(shape, dtype, feature):
    """A call of types alone, as large as no array here could be; and its options."""
    s = shape
    arrays = {
        "query": ((s.B, s.T, s.N, s.H), dtype),
        "key": ((s.B, s.S, s.kv_heads, s.H), dtype),
        "value": ((s.B, s.S, s.kv_heads, s.value_depth), dtype),
    }
    options = {}
    for name, value in WORKSPACE_FEATURES[feature].items():
        if callable(value):
            arrays[name] = value(s)
        else:
            options[name] = value
    return Call({n: jax.ShapeDtypeStruct(*array) for n, array in arrays.items()}, options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("feature", WORKSPACE_FEATURES)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_workspaces_for_symbolic_sizes_are_large_enough(monkeypatch, shape, feature, dtype):
    """What bounds them holds where sizes are known, not by much, and without leaving 32 bits."""
    platform = _platforms.PLATFORMS["cuda"]
    exact, checked = platform.workspace, []

    def in_32_bits(arrays, shape_of=lambda array: array.shape):
        return {n: tuple(np.int32(x) for x in shape_of(array)) for n, array in arrays.items()}

    def workspace(call):
        (asked,) = exact(call)
        operands = {n: types.SimpleNamespace(shape=s) for n, s in in_32_bits(call.operands).items()}
        results = in_32_bits(call.results, lambda result: result[0])
        small = dataclasses.replace(
            call, operands=operands, results={n: (s, None) for n, s in results.items()}
        )
        most = 1024 * int(platform._most_kibibytes(small))  # an overflow is a warning, an error
        assert asked.size <= most < 1.4 * asked.size + 2**28
        checked.append(call.target.name)
        return [asked]

    monkeypatch.setattr(platform, "workspace", workspace)
    lowered(types_of(shape, dtype, feature))
    assert checked == ["jaxflash_forward", "jaxflash_backward"]


def test_export_with_symbolic_batch_and_lengths():
    b, t, s = jax.export.symbolic_shape("b, t, s")
    query = jax.ShapeDtypeStruct((b, t, 4, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((b, s, 2, 64), jnp.bfloat16)
    run = jax.jit(
        jax.grad(
            lambda q, k: flash_attention(q, k, k, implementation="native").astype("float32").sum(),
            (0, 1),
        )
    )
    exported = export(run, query, key, platforms=["cpu", "cuda"])
    assert str(exported.out_avals[1].shape) == "(b, s, 2, 64)"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--length 4096 --head-dim 128 --causal", ["Hopper", "Hopper"]),
        ("--length 333 --head-dim 64 --with bias mask dropout", ["Hopper", "Hopper"]),
        ("--length 333 --deterministic --head-dim 128 --capability 9.0", ["Hopper", "Hopper"]),
        ("--length 333 --deterministic --head-dim 256", ["Hopper", "portable"]),
        ("--length 333 --deterministic --with mask", ["Hopper", "portable"]),
        ("--length 333 --dtype float32", ["portable", "portable"]),
        ("--length 333 --head-dim 65", ["portable", "portable"]),
        ("--length 333 --capability 12.0", ["portable", "portable"]),
        ("--length 333 --capability 8.9 --with sinks lengths", ["portable", "portable"]),
        ("--length 333 --key-length 20 --kv-heads 2 --value-dim 32", ["Hopper", "Hopper"]),
        ("--length 333 --window 5 --with segment-ids soft-cap", ["Hopper", "Hopper"]),
        ("--length 333 --with bias soft-cap", ["Hopper", "portable"]),
        ("--length 333 --key-length 0", ["portable", "portable"]),
    ],
)
def test_command_line_says_which_kernels_a_call_runs(options, said, capsys, monkeypatch):
    if "90a-real" not in _modules.MODULES["cuda"].facts["architectures"]:
        pytest.skip("built without the Hopper kernels")
    monkeypatch.setattr(command, "local_capability", lambda: 90)
    monkeypatch.setattr(_choice, "has_code", lambda architectures, capability: True)
    command.main(options.split())
    gpu, *lines = capsys.readouterr().out.splitlines()
    assert gpu.startswith("for compute capability ")
    assert [line.partition(":")[0] for line in lines] == ["forward", "backward"]
    for line, family in zip(lines, said, strict=True):
        assert f": {family} kernel" in line
        assert re.search(r"tiles of \d+ queries and \d+ keys", line)


def test_command_line_says_that_nothing_is_computed(capsys):
    command.main(["--length", "333", "--batch", "0", "--capability", "9.0"])
    assert capsys.readouterr().out.splitlines() == [
        "for compute capability 9.0",
        "forward: nothing to compute",
        "backward: nothing to compute",
    ]


@pytest.mark.parametrize(
    ("local", "options", "said"),
    [
        (90, "", "for compute capability 9.0, the GPU's here"),
        (None, "", "for compute capability 9.0: there is no GPU here"),
        (None, " --capability 12.0", "for compute capability 12.0"),
    ],
)
def test_command_line_says_for_which_gpu(local, options, said, capsys, monkeypatch):
    monkeypatch.setattr(command, "local_capability", lambda: local)
    monkeypatch.setattr(_choice, "has_code", lambda architectures, capability: True)
    command.main(f"--length 333{options}".split())
    assert capsys.readouterr().out.splitlines()[0] == said


@pytest.mark.parametrize(
    ("architectures", "runs_on", "not_on"),
    [
        (["80-real", "90-real", "90a-real"], [80, 86, 89, 90], [100, 120]),
        (["80-virtual"], [80, 90, 120], [75]),
        (["90"], [90, 100], [80, 89]),
        (["native"], [80], []),
    ],
)
def test_what_a_build_runs_on(architectures, runs_on, not_on):
    for capability in runs_on:
        assert _choice.has_code(architectures, capability)
    for capability in not_on:
        assert not _choice.has_code(architectures, capability)


def test_command_line_says_why_there_is_no_kernel(capsys):
    options = "--length 333 --batch 2 --with bias --deterministic --capability 9.0"
    command.main(options.split())
    _, forward, backward = capsys.readouterr().out.splitlines()
    assert "kernel" in forward
    assert 'backward: implementation "xla": its native kernels add up' in backward


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--causal", "--length: expected with the other options"),
        ("--length 4 --kv-heads 3", "multiple of the 3 key/value heads, got 8"),
        ("--length 4 --head-dim 300", "head"),
        ("--length 4 --dtype float64", "--dtype"),
        ("--length 4 --capability 7.5", "need compute capability 8.0 or more, got 7.5"),
        ("--length 4 --capability Hopper", "expected major.minor, as 9.0, got Hopper"),
        ("--length 4 --capability 8.15", "expected major.minor, as 9.0, got 8.15"),
        ("--length 4 --capability 90", "expected major.minor, as 9.0, got 90"),
        ("--length -4", "--length: expected a number from 0"),
        ("--length 4 --batch 99999999999", "--batch: expected a number from 0"),
        ("--batch 1 --heads 8", "--length: expected with the other options"),
    ],
)
def test_command_line_refuses(options, text, capsys):
    with pytest.raises(SystemExit):
        command.main(options.split())
    assert text in capsys.readouterr().err
