"""What computes a call of attention, told without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxflash import _native
from jaxflash._modules import MODULES
from jaxflash._platforms import BACKWARD, FORWARD, Call, Cuda, Target
from jaxflash._primitives import backward_p, forward_p

NAMES = {forward_p: ("forward", _native.forward), backward_p: ("backward", _native.backward)}


class _Asked(Cuda):
    """The CUDA kernels, that say what they are whenever they are called."""

    def __init__(self, capability: int):
        super().__init__(MODULES["cuda"])
        self._capability = capability
        self.answers: dict[Target, str] = {}

    def workspace(self, call: Call) -> list[Any]:
        """The workspace, as ever."""
        self.answers[call.target] = self.kernel(call, self._capability)
        return super().workspace(call)


def cuda_choice(function: Callable[..., Any], *operands: Any, capability: int) -> Iterator[str]:
    """Says of each call of attention in a function which CUDA kernel computes it.

    Args:
      function: a function of arrays that JAX can trace, derivatives included.
      operands: its arrays, or their shapes and dtypes.
      capability: of the GPU, ten times the major version and the minor one: 90 for an H100.

    Yields:
      Lines "forward: ..." and "backward: ...".

    Raises:
      NotImplementedError: there are no CUDA kernels here.
    """
    if reason := MODULES["cuda"].reason:
        raise NotImplementedError(f"no CUDA kernels here: {reason}")
    for equation in _equations(jax.make_jaxpr(function)(*operands).jaxpr):
        if equation.primitive not in NAMES:
            continue
        name, native = NAMES[equation.primitive]
        types = [variable.aval for variable in equation.invars]
        if why_not := _native.why_not("cuda", types, **equation.params):
            yield f'{name}: implementation "xla": {why_not}'
            continue
        asked = _Asked(capability)
        jax.eval_shape(functools.partial(native, asked, **equation.params), *types)
        answer = asked.answers.get(FORWARD if name == "forward" else BACKWARD)
        yield f"{name}: {answer or 'nothing to compute'}"


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program and of those within it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)
