"""CUDA attention kernels of jaxflash as XLA custom calls."""

from collections.abc import Sequence

from typing_extensions import CapsuleType


def registrations() -> dict[str, CapsuleType]:
    """Custom-call targets by name, as capsules."""

def build_facts() -> dict[str, object]:
    """
    Version, compiler, XLA FFI version, limits, CUDA version and architectures built for.
    """

def forward_workspace(operands: Sequence[tuple[str, Sequence[int]]], *, window_left: int, window_right: int, soft_cap: float, dropout_threshold: int) -> int:
    """
    Bytes of workspace of a forward call, from (dtype name, shape) of its operands.
    """

def backward_workspace(operands: Sequence[tuple[str, Sequence[int]]], results: Sequence[tuple[str, Sequence[int]]], *, deterministic: bool, window_left: int, window_right: int, soft_cap: float, dropout_threshold: int) -> int:
    """
    Bytes of workspace of a backward call, also from those of its five cotangents.
    """

def forward_kernel(operands: Sequence[tuple[str, Sequence[int]]], *, window_left: int, window_right: int, soft_cap: float, dropout_threshold: int, capability: int) -> str:
    """
    What computes such a call on a GPU of a compute capability (90 for 9.0), in words; empty where no kernel does.
    """

def backward_kernel(operands: Sequence[tuple[str, Sequence[int]]], results: Sequence[tuple[str, Sequence[int]]], *, deterministic: bool, window_left: int, window_right: int, soft_cap: float, dropout_threshold: int, capability: int) -> str:
    """Likewise of a backward call."""
