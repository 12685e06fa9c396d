"""What computes a call of attention, told without running it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from jaxflash import _native
from jaxflash._modules import MODULES
from jaxflash._platforms import FORWARD, Call, Cuda
from jaxflash._primitives import backward_p, forward_p

# Names of the primitives, and what calls their kernels.
_CALLS = {forward_p: ("forward", _native.forward), backward_p: ("backward", _native.backward)}


class _Noting(Cuda):
    """The CUDA kernels; notes which of them a call would run."""

    def __init__(self, capability: int):
        super().__init__(MODULES["cuda"])
        self._capability = capability
        self.noted = "nothing to compute"  # unless there is a call

    def workspace(self, call: Call) -> list[Any]:
        """The type of the call's workspace: every call asks for it."""
        if call.target is not FORWARD or math.prod(call.operands["query"].shape):
            self.noted = self.kernel(call, self._capability)
        return super().workspace(call)


def cuda_choice(function: Callable[..., Any], *operands: Any, capability: int) -> Iterator[str]:
    """Says of each call of attention in a function which CUDA kernel computes it.

    Args:
      function: a function of arrays that JAX can trace, derivatives included.
      operands: its arrays, or their shapes and dtypes.
      capability: the GPU's compute capability, 10 * major + minor: 90 for an H100.

    Yields:
      Lines "forward: ..." and "backward: ...".

    Raises:
      NotImplementedError: there are no CUDA kernels here, or none for such a GPU.
    """
    if reason := MODULES["cuda"].reason:
        raise NotImplementedError(f"no CUDA kernels here: {reason}")
    got = f"{capability // 10}.{capability % 10}"
    if capability < 80:
        raise NotImplementedError(f"CUDA kernels need compute capability 8.0 or more, got {got}")
    architectures = MODULES["cuda"].facts["architectures"]
    if not has_code(architectures, capability):
        raise NotImplementedError(
            f"these CUDA kernels have no code for compute capability {got}, "
            f"they were built for {', '.join(architectures)}"
        )
    for equation in _equations(jax.make_jaxpr(function)(*operands).jaxpr):
        if equation.primitive not in _CALLS:
            continue
        name, native = _CALLS[equation.primitive]
        types = [variable.aval for variable in equation.invars]
        if why_not := _native.why_not("cuda", types, **equation.params):
            yield f'{name}: implementation "xla": {why_not}'
            continue
        platform = _Noting(capability)
        jax.eval_shape(functools.partial(native, platform, **equation.params), *types)
        yield f"{name}: {platform.noted}"


def has_code(architectures: Iterable[str], capability: int) -> bool:
    """Whether a build for `architectures`, as CMake has them, runs on such GPUs.

    Machine code does on later ones of the same generation, PTX on all later ones.
    """
    for architecture in architectures:
        match = re.fullmatch(r"(\d+)[af]?(-real|-virtual)?", architecture)
        if match is None:  # "native" and the like: only the compiler knew
            return True
        number, kind = int(match[1]), match[2]
        if number > capability:
            continue
        if kind != "-real" or number // 10 == capability // 10:
            return True
    return False


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program and of those within it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)
