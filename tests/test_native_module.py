"""The compiled modules: what they say of themselves, and when one is missing."""

import importlib

import jax
import jax.numpy as jnp
import pytest

import jaxflash
from calls import run_python
from jaxflash import __main__ as command
from jaxflash import _modules, flash_attention


@pytest.fixture(params=_modules.MODULES)
def module(request):
    """Each compiled module that can be used."""
    if reason := _modules.unavailable_reason(request.param):
        pytest.skip(reason)
    return _modules.MODULES[request.param]


def test_build_facts(module):
    assert module.facts["version"] == jaxflash.__version__
    assert module.facts["compiler"]
    major, minor = module.facts["xla_ffi_api"]
    assert (major, minor) == (0, 3), (
        "built against newer headers than the oldest supported jaxlib's"
    )


def test_what_was_built_for():
    cpu, cuda = (_modules.MODULES[name].facts for name in ("cpu", "cuda"))
    assert not cpu or cpu["instruction_set"] in cpu["instruction_sets"]
    assert not cuda or all(name[0].isdigit() for name in cuda["architectures"])


def test_registrations(module):
    registrations = module.code.registrations()
    assert set(registrations) == {"jaxflash_forward", "jaxflash_backward"}
    assert all(type(x).__name__ == "PyCapsule" for x in registrations.values())


def test_native_lowers_to_the_custom_calls(native):
    x = jnp.zeros((1, 4, 1, 4))
    run = jax.jit(jax.grad(lambda x: flash_attention(x, x, x, implementation=native).sum()))
    text = run.lower(x).as_text()
    assert "jaxflash_forward" in text
    assert "jaxflash_backward" in text


def test_xla_lowers_to_no_custom_call():
    x = jnp.zeros((1, 4, 1, 4))
    run = jax.jit(jax.grad(lambda x: flash_attention(x, x, x, implementation="xla").sum()))
    assert "jaxflash_" not in run.lower(x).as_text()


def command_line():
    """What `python -m jaxflash` prints."""
    return run_python("import runpy; runpy.run_module('jaxflash', run_name='__main__')")


def test_command_line():
    """Versions, what was found, and the state of the CPU and the CUDA kernels."""
    text = command_line()
    assert jaxflash.__version__ in text
    assert jax.__version__ in text
    assert "cpu kernels: o" in text
    assert "cuda kernels: o" in text
    for kernels in ("cpu", "cuda"):
        off = f"{kernels} kernels: off" in text
        assert not off or "reason: " in text.split(f"{kernels} kernels: off")[1]


def test_command_line_reports_the_build(module):
    _, _, text = command_line().partition(f"{module.name.rpartition('_')[2]} kernels: on")
    for name in module.facts:
        assert f"{name}: " in text
    assert module.facts["compiler"] in text


def test_command_line_without_the_cuda_module(monkeypatch, capsys):
    absent = _modules.Module("jaxflash._cuda", None, "was not built")
    monkeypatch.setitem(_modules.MODULES, "cuda", absent)
    with pytest.raises(SystemExit):
        command.main(["--length", "4"])
    assert "no CUDA kernels here: was not built" in capsys.readouterr().err


WITHOUT_MODULE = """
    import sys, warnings
    sys.modules["jaxflash._cpu"] = None
    import jax, jax.numpy as jnp
    from jaxflash import flash_attention

    x = jnp.ones((1, 4, 1, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            jax.jit(lambda x: flash_attention(x, x, x))(x)
            jax.grad(lambda x: flash_attention(x, x, x).sum())(x)
    (warning,) = caught
    print(warning.message)
    try:
        flash_attention(x, x, x, implementation="native")
    except NotImplementedError as error:
        print(error)
"""


def test_b134_without_the_module():
    """None: `xla` and one warning that names the reason; "native": an error that names it."""
    warning, error = run_python(WITHOUT_MODULE).splitlines()
    assert "xla" in warning
    for text in (warning, error):
        assert "jaxflash._cpu" in text
        assert "built" in text or "loaded" in text


NEWER_HEADERS = """
    import sys, types
    fake = types.ModuleType("jaxflash._cpu")
    fake.build_facts = lambda: {
        "version": "0", "compiler": "none", "xla_ffi_api": (0, 99), "instruction_set": "none",
        "instruction_sets": ["none"],
    }
    fake.registrations = lambda: {}
    sys.modules["jaxflash._cpu"] = fake
    try:
        import jaxflash
    except ImportError as error:
        print(error)
"""


def test_b121_module_built_on_newer_headers_is_refused_at_import():
    """Registering its handlers would take the backend down; the message names both versions."""
    message = run_python(NEWER_HEADERS)
    assert "0.99" in message
    assert jax.lib.__version__ in message
    assert any(f"0.{minor}" in message.replace("0.99", "") for minor in range(3, 10))


def test_b124_import_warns_of_nothing():
    """As JAX warns of what it is going to remove."""
    script = """
        import warnings
        import equinox, flax, jax
        warnings.simplefilter("error")
        import jaxflash, jaxflash.bench.__main__, jaxflash.equinox, jaxflash.flax
        x = jax.numpy.ones((1, 4, 1, 4))
        jax.grad(lambda x: jaxflash.flash_attention(x, x, x, implementation="xla").sum())(x)
        print("no warning")
    """
    assert run_python(script).strip() == "no warning"


def test_version_matches_the_installed_package():
    metadata = importlib.import_module("importlib.metadata")
    try:
        installed = metadata.version("jaxflash")
    except metadata.PackageNotFoundError:
        pytest.skip("jaxflash is imported from its source folder, not installed")
    assert installed == jaxflash.__version__


def test_public_names():
    assert set(jaxflash.__all__) >= {"flash_attention"}
    assert flash_attention.__doc__
    for name in ("query_offset", "sinks", "logits_soft_cap", "return_residual"):
        assert name in flash_attention.__doc__
