"""The compiled module: what it says of itself, how it is registered, and when it is missing."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from calls import run_python
from jaxflash import flash_attention


@pytest.fixture
def cpu_module(native):
    return importlib.import_module("jaxflash._cpu")


def test_build_facts(cpu_module):
    facts = cpu_module.build_facts()
    assert facts["version"] == jaxflash.__version__
    assert facts["compiler"]
    assert facts["instruction_set"] in facts["instruction_sets"]
    major, minor = facts["xla_ffi_api"]
    assert (major, minor) == (0, 3), (
        "built against newer headers than the oldest supported jaxlib's"
    )


def test_registrations(cpu_module):
    registrations = cpu_module.registrations()
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


def test_command_line_reports_the_build(cpu_module):
    text = command_line()
    facts = cpu_module.build_facts()
    assert "cpu kernels: on" in text
    assert facts["instruction_set"] in text
    assert facts["compiler"] in text


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


def test_without_the_module():
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


def test_module_built_on_newer_headers_is_refused_at_import():
    """Registering its handlers would take the backend down; the message names both versions."""
    message = run_python(NEWER_HEADERS)
    assert "0.99" in message
    assert jax.lib.__version__ in message
    assert any(f"0.{minor}" in message.replace("0.99", "") for minor in range(3, 10))


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


def test_handlers_refuse_wrong_buffers(native):
    """What the Python side never sends gets an error with numbers, not a crash."""
    shape = jax.ShapeDtypeStruct((1, 4, 1, 4), np.float32)
    call = jax.ffi.ffi_call("jaxflash_forward", (shape,) * 3)
    absent = np.zeros(0, np.uint8)
    attributes = {
        "window_left": np.int64(-1),
        "window_right": np.int64(-1),
        "soft_cap": np.float64(0),
        "dropout_threshold": np.int64(0),
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"\d"):
        call(*([np.zeros((1, 4, 1, 4), np.float32)] * 13), **attributes)
    with pytest.raises(jax.errors.JaxRuntimeError):
        call(*([absent] * 13), **attributes)
