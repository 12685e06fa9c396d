"""The compiled modules: whether they are there, and what they say of themselves."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

FORWARD_TARGET = "jaxflash_forward"
BACKWARD_TARGET = "jaxflash_backward"


@dataclass(frozen=True)
class Module:
    """A compiled module, or why it is not used.

    Attributes:
      name: its full name.
      code: the module itself; None where it could not be loaded.
      reason: why its kernels are not used; None where they are.
    """

    name: str
    code: ModuleType | None
    reason: str | None

    @property
    def facts(self) -> dict[str, Any]:
        """What it says of its build; empty where it could not be loaded."""
        return self.code.build_facts() if self.code else {}


def jaxlib_version() -> str:
    """The version of the jaxlib that is running."""
    return metadata.version("jaxlib")


def runtime_ffi_version() -> tuple[int, int]:
    """The XLA FFI version of the jaxlib that is running, from the headers that it ships."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(match.group(1))
        for part in ("MAJOR", "MINOR")
        if (match := re.search(rf"#define XLA_FFI_API_{part} (\d+)", header))
    )
    return major, minor


def _load(name: str, platform: str) -> Module:
    """Imports a compiled module and registers its custom calls for a platform."""
    try:
        code = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        reason = (
            f"{name} was not built into {Path(__file__).parent}; `pip install .` in the source "
            "builds it (import jaxflash from another folder then, or install it with -e)"
        )
        return Module(name, None, reason)
    except ImportError as error:
        return Module(name, None, f"{name} could not be loaded: {error}")
    built, running = tuple(code.build_facts()["xla_ffi_api"]), runtime_ffi_version()
    if built > running:
        # Registered all the same it would take down the whole backend at the first JAX call.
        reason = (
            f"{name} was compiled for XLA FFI {built[0]}.{built[1]}, newer than the "
            f"{running[0]}.{running[1]} of jaxlib {jaxlib_version()}: "
            "install a newer jaxlib, or build jaxflash with this one"
        )
        return Module(name, code, reason)
    for target, handler in code.registrations().items():
        # Plugins take what is registered for the upper-case name; only "cpu" is lower-case.
        jax.ffi.register_ffi_target(
            target, handler, platform=platform if platform == "cpu" else platform.upper()
        )
    return Module(name, code, None)


MODULES = {platform: _load(f"jaxflash._{platform}", platform) for platform in ("cpu", "cuda")}

# A CPU module that is there and cannot be used is a broken installation; CUDA is optional.
if MODULES["cpu"].code and MODULES["cpu"].reason:
    raise ImportError(MODULES["cpu"].reason)


def unavailable_reason(platform: str) -> str | None:
    """Why there are no native kernels for a platform; None where there are."""
    if platform not in MODULES:
        return "native kernels exist for " + " and ".join(MODULES)
    return MODULES[platform].reason


def check_available() -> None:
    """Raises where no platform has native kernels.

    Raises:
      NotImplementedError: with the reasons.
    """
    reasons = [module.reason for module in MODULES.values()]
    if all(reasons):
        raise NotImplementedError(
            'implementation="native": no native kernels here: ' + "; ".join(map(str, reasons))
        )
