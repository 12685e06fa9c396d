"""The implementations that the suite runs over, and what every test may ask for."""

import functools
import os

# Most programs here run once: LLVM's expensive passes would take half the suite's time. The graph
# that XLA makes, and so what tests say of it, is the same. Set XLA_FLAGS to try others.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
import jax.numpy as jnp
import pytest

from jaxflash import flash_attention

IMPLEMENTATIONS = ("native", "xla")


@functools.cache
def why_not(implementation):
    """Why the implementation can't run on the default device; empty where it can."""
    x = jnp.zeros((1, 1, 1))
    try:
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
