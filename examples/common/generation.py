"""A sample from a trained model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from common.corpus import START
from common.model import LanguageModel, Params


def generate(
    model: LanguageModel,
    params: Params,
    prompt: str,
    length: int,
    key: jax.Array,
    temperature: float = 0.8,
) -> str:
    """Writes a document that begins with `prompt`.

    Args:
        model: the model.
        params: its parameters.
        prompt: cut to its first `length - 1` bytes.
        length: bytes in all.
        key: a JAX PRNG key.
        temperature: more than 0; the lower, the more often the likeliest byte is taken.
    """
    known = np.frombuffer(prompt.encode()[: length - 1], np.uint8)
    tokens = np.full(length + 1, START, np.uint8)
    tokens[1 : 1 + len(known)] = known
    tokens = _fill(model, params, tokens, 1 + len(known), key, temperature)
    return bytes(np.asarray(tokens[1:])).decode(errors="replace")


@partial(jax.jit, static_argnames="model")
def _fill(
    model: LanguageModel,
    params: Params,
    tokens: jax.Array,
    known: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """Samples `tokens[known:]`, one token a pass over the whole row `[T]`.

    All passes have one shape, so that the loop compiles once. What still is to be filled doesn't
    matter: attention is causal.
    """

    def fill_next(index: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = model.logits(params, tokens[None])[0, index - 1]
        logits = logits.at[START].set(-jnp.inf)  # no other document begins
        token = jax.random.categorical(jax.random.fold_in(key, index), logits / temperature)
        return tokens.at[index].set(token.astype(tokens.dtype))

    return jax.lax.fori_loop(known, tokens.size, fill_next, tokens)
