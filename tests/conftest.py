"""The implementations that the suite runs over, and what every test may ask for."""

import functools
import importlib.util
import os

# Most programs here run once: on a CPU LLVM's expensive passes would take half the suite's time, on
# a GPU the search for the fastest matrix product. The graph that XLA makes, and so what tests say
# of it, is the same. Set XLA_FLAGS to try others.
# Eight CPU devices are for the tests of sharding; all others use the first.
if any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_gpu_autotune_level=0"
    )
    # Each of pytest-xdist's processes would take three quarters of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true",
    )

import jax
import jax.numpy as jnp
import pytest

from jaxflash import _modules, flash_attention

IMPLEMENTATIONS = ("native", "xla")


@functools.cache
def why_not(implementation, dtype="float32"):
    """Why the implementation can't run on the default device; empty where it can."""
    try:
        with jax.enable_x64(True):
            x = jnp.zeros((1, 1, 1), dtype)
            jax.block_until_ready(flash_attention(x, x, x, implementation=implementation))
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Every test that takes this runs on every implementation; one that isn't there is skipped."""
    if reason := why_not(request.param):
        pytest.skip(f"implementation {request.param!r} is not available here: {reason}")
    return request.param


@pytest.fixture
def default_implementation():
    """What a call runs by default on this device, by name: for tests of what is around the call."""
    return "xla" if why_not("native") else "native"


@pytest.fixture
def float64_implementation(implementation):
    """Those implementations that compute in float64 on the default device: not the CUDA kernels."""
    if reason := why_not(implementation, "float64"):
        pytest.skip(reason)
    return implementation


@pytest.fixture(params=_modules.MODULES)
def platform(request):
    """Each platform with kernels and a device here, on which the test then runs."""
    if reason := _modules.unavailable_reason(request.param):
        pytest.skip(reason)
    try:
        device = jax.devices(request.param)[0]
    except RuntimeError as error:
        pytest.skip(f"no {request.param} device here: {error}")
    with jax.default_device(device):
        yield request.param


@pytest.fixture
def native():
    """For what only the native implementation promises."""
    if reason := why_not("native"):
        pytest.skip(f"implementation 'native' is not available here: {reason}")
    return "native"


@pytest.fixture
def x64():
    """Runs the test with 64-bit types enabled."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="module")
def release_compiled_functions():
    """Hundreds of compiled functions a file would add up to gigabytes."""
    yield
    jax.clear_caches()
