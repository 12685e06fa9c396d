"""CPU attention kernels of jaxflash as XLA custom calls."""

from typing_extensions import CapsuleType


def registrations() -> dict[str, CapsuleType]:
    """Custom-call targets by name, as capsules."""

def build_facts() -> dict[str, object]:
    """
    Version, compiler, XLA FFI version, limits, instruction sets built and the one in use.
    """
