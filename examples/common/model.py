"""What the training code needs to know of a model, whichever library it is written in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from common.corpus import locate_documents

Params = Any
"""A pytree of float32 arrays."""


@dataclass(frozen=True)
class LanguageModel:
    """A model as two pure functions.

    Attributes:
        init: PRNG key -> parameters.
        apply: (parameters, tokens, segment_ids, positions), the latter three int `[B, T]`, ->
            logits `[B, T, VOCABULARY]`. It computes in the parameters' dtype.
        dtype: of the computation.
        dealt_axes: names of layers -> the axis of their weights that is dealt to several devices,
            so that each has some heads or hidden channels.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]
    dtype: str
    dealt_axes: Mapping[str, int] = field(compare=False)

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Predicts each next token from the earlier ones of its document.

        Args:
            params: float32; the computation uses a copy in `dtype`.
            tokens: integers `[B, T]`.

        Returns:
            float32 `[B, T, VOCABULARY]`.
        """
        params = jax.tree.map(lambda param: param.astype(self.dtype), params)
        logits = self.apply(params, tokens.astype(jnp.int32), *locate_documents(tokens))
        return logits.astype(jnp.float32)
