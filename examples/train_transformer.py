"""Trains a byte-level language model written in Flax NNX on the Python standard library.

Results are written into a folder in runs/: the loss curves (curves.png, metrics.json), a sample of
the model's writing (sample.txt) and checkpoints. `train_equinox.py` is the same with Equinox.

Examples:
    python examples/train_transformer.py
    python examples/train_transformer.py --preset small --attention xla
    python examples/train_transformer.py --data 2 --tensor 2
"""

from functools import partial

import jax
from flax import nnx

from common.corpus import VOCABULARY
from common.layers import jax_attention, rotary
from common.model import LanguageModel, Params
from common.settings import ModelSettings
from common.training import run
from jaxflash import flash_attention


class Attention(nnx.Module):
    """Causal self-attention within each document of a row."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs):
        linear = partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        width, head_width = settings.width, settings.head_width
        self.query = linear(width, (settings.heads, head_width))
        self.key = linear(width, (settings.key_value_heads, head_width))
        self.value = linear(width, (settings.key_value_heads, head_width))
        self.output = linear((settings.heads, head_width), width, axis=(-2, -1))
        self.attention = settings.attention

    def __call__(self, x: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        query = rotary(self.query(x), positions)  # [B, T, N, H]
        key = rotary(self.key(x), positions)  # [B, T, K, H]
        value = self.value(x)
        if self.attention == "jaxflash":
            mixed = flash_attention(
                query,
                key,
                value,
                is_causal=True,
                query_segment_ids=segment_ids,
                key_value_segment_ids=segment_ids,
            )
        else:
            mixed = jax_attention(query, key, value, segment_ids, self.attention)
        return self.output(mixed)


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate = linear(settings.width, settings.hidden)
        self.up = linear(settings.width, settings.hidden)
        self.down = linear(settings.hidden, settings.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and MLP, each of the normalised input and added to it."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(settings.width, rngs=rngs)
        self.attention = Attention(settings, rngs)
        self.mlp_norm = nnx.RMSNorm(settings.width, rngs=rngs)
        self.mlp = MLP(settings, rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), segment_ids, positions)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    """A decoder of bytes."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs):
        # The other layers follow the dtype of their input and parameters.
        self.embedding = nnx.Embed(VOCABULARY, settings.width, dtype=settings.dtype, rngs=rngs)
        self.blocks = nnx.List(Block(settings, rngs) for _ in range(settings.layers))
        self.norm = nnx.RMSNorm(settings.width, rngs=rngs)
        self.logits = nnx.Linear(settings.width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Maps tokens, segment ids and positions, int `[B, T]`, to logits `[B, T, VOCABULARY]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, segment_ids, positions)
        return self.logits(self.norm(x))


# Weights are [width, heads, head width] or [width, hidden], and the other way round.
DEALT_AXES = {"query": 1, "key": 1, "value": 1, "output": 0, "gate": 1, "up": 1, "down": 0}


def build_model(settings: ModelSettings) -> LanguageModel:
    """Splits the Flax model into its parameters and a pure function of them."""

    def init(key: jax.Array) -> Params:
        return nnx.state(Transformer(settings, nnx.Rngs(key)), nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(settings, nnx.Rngs(0))))

    def apply(params: Params, *inputs: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(*inputs)

    return LanguageModel(init, apply, settings.dtype, DEALT_AXES)


if __name__ == "__main__":
    run("transformer", __doc__, build_model)
