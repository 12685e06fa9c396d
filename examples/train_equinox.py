"""Trains a byte-level language model written in Equinox on the Python standard library.

The model is written for one sequence, as is usual in Equinox, and `jax.vmap` makes a batch of it.
Results are written into a folder in runs/: the loss curves (curves.png, metrics.json), a sample of
the model's writing (sample.txt) and checkpoints. `train_transformer.py` is the same with Flax.

Examples:
    python examples/train_equinox.py
    python examples/train_equinox.py --preset small --attention xla
"""

from functools import partial

import equinox as eqx
import jax

from common.corpus import VOCABULARY
from common.layers import jax_attention, rotary
from common.model import LanguageModel, Params
from common.settings import ModelSettings
from common.training import run
from jaxflash import flash_attention


class Attention(eqx.Module):
    """Causal self-attention of one row, within each document."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    head_width: int = eqx.field(static=True)
    attention: str = eqx.field(static=True)

    def __init__(self, settings: ModelSettings, key: jax.Array):
        linear = partial(eqx.nn.Linear, use_bias=False)
        query_key, key_key, value_key, output_key = jax.random.split(key, 4)
        query_width = settings.heads * settings.head_width
        key_value_width = settings.key_value_heads * settings.head_width
        self.query = linear(settings.width, query_width, key=query_key)
        self.key = linear(settings.width, key_value_width, key=key_key)
        self.value = linear(settings.width, key_value_width, key=value_key)
        self.output = linear(query_width, settings.width, key=output_key)
        self.head_width = settings.head_width
        self.attention = settings.attention

    def __call__(self, x: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        length = x.shape[0]
        query, key, value = (
            jax.vmap(project)(x).reshape(length, -1, self.head_width)
            for project in (self.query, self.key, self.value)
        )  # [T, N, H], [T, K, H], [T, K, H]
        query, key = rotary(query, positions), rotary(key, positions)
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
        return jax.vmap(self.output)(mixed.reshape(length, -1))


class MLP(eqx.Module):
    """SwiGLU (arXiv 2002.05202) of one token."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, settings: ModelSettings, key: jax.Array):
        linear = partial(eqx.nn.Linear, use_bias=False)
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate = linear(settings.width, settings.hidden, key=gate_key)
        self.up = linear(settings.width, settings.hidden, key=up_key)
        self.down = linear(settings.hidden, settings.width, key=down_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(eqx.Module):
    """Attention and MLP, each of the normalised input and added to it."""

    attention_norm: eqx.nn.RMSNorm
    attention: Attention
    mlp_norm: eqx.nn.RMSNorm
    mlp: MLP

    def __init__(self, settings: ModelSettings, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = eqx.nn.RMSNorm(settings.width, use_bias=False)
        self.attention = Attention(settings, attention_key)
        self.mlp_norm = eqx.nn.RMSNorm(settings.width, use_bias=False)
        self.mlp = MLP(settings, mlp_key)

    def __call__(self, x: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = x + self.attention(jax.vmap(self.attention_norm)(x), segment_ids, positions)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class Transformer(eqx.Module):
    """A decoder of bytes."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    logits: eqx.nn.Linear

    def __init__(self, settings: ModelSettings, key: jax.Array):
        embedding_key, logits_key, *block_keys = jax.random.split(key, 2 + settings.layers)
        self.embedding = eqx.nn.Embedding(VOCABULARY, settings.width, key=embedding_key)
        self.blocks = [Block(settings, block_key) for block_key in block_keys]
        self.norm = eqx.nn.RMSNorm(settings.width, use_bias=False)
        self.logits = eqx.nn.Linear(settings.width, VOCABULARY, use_bias=False, key=logits_key)

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Maps tokens, segment ids and positions, int `[T]`, to logits `[T, VOCABULARY]`."""
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x, segment_ids, positions)
        return jax.vmap(lambda token: self.logits(self.norm(token)))(x)


# Weights are [out, in]; heads are part of their layers' output, or input.
DEALT_AXES = {"query": 0, "key": 0, "value": 0, "output": 1, "gate": 0, "up": 0, "down": 1}


def build_model(settings: ModelSettings) -> LanguageModel:
    """Splits the Equinox model into its parameters and a pure function of them, and batches it."""

    def make(key: jax.Array) -> Transformer:
        return Transformer(settings, key)

    def init(key: jax.Array) -> Params:
        return eqx.filter(make(key), eqx.is_array)

    structure = eqx.filter_eval_shape(make, jax.random.key(0))
    _, static = eqx.partition(structure, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def apply(params: Params, *inputs: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(params, static))(*inputs)

    return LanguageModel(init, apply, settings.dtype, DEALT_AXES)


if __name__ == "__main__":
    run("equinox", __doc__, build_model)
