"""CUDA kernels of jaxflash."""

from typing_extensions import CapsuleType


def build_facts() -> dict[str, object]:
    """What this module was built with and for."""

def registrations() -> dict[str, CapsuleType]:
    """XLA FFI handlers: target name to capsule."""
