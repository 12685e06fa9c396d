"""Attention with a bias from a pair representation, as in structure prediction, and its gradient.

    python examples/pair_bias.py

Residues attend to each other; a representation of each pair, `[L, L, C]`, is projected to a bias of
each head. Gradients reach the pair representation through the bias, which has the shape that it
was given. Compared with the formula, whose probabilities `[N, L, L]` are in memory.
"""

import argparse

import jax
import jax.numpy as jnp

from jaxflash import flash_attention

RESIDUES, CHANNELS, PAIR_CHANNELS, HEADS, HEAD_DIM = 200, 64, 16, 4, 16


def new_parameters(key):
    keys = jax.random.split(key, 4)
    width = HEADS * HEAD_DIM
    shapes = {
        "qkv": (CHANNELS, 3 * width),
        "bias": (PAIR_CHANNELS, HEADS),
        "gate": (CHANNELS, width),
        "out": (width, CHANNELS),
    }
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def dense(query, key, value, bias, mask):
    """What `flash_attention` computes, by the formula."""
    logits = jnp.einsum("tnh,snh->nts", query, key) * HEAD_DIM**-0.5 + bias
    return jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(mask, logits, -jnp.inf)), value)


def pair_attention(attention, parameters, single, pair, present):
    """Gated attention of residues `[L, C]` with a bias from pairs `[L, L, Cp]`.

    Args:
      attention: function of query, key, value, bias and mask.
      parameters: the layer's.
      single: the residues.
      pair: their pairs.
      present: bool `[L]`, False for residues that are not resolved.
    """
    projected = (single @ parameters["qkv"]).reshape(RESIDUES, 3 * HEADS, HEAD_DIM)
    query, key, value = jnp.split(projected, 3, axis=1)
    bias = jnp.moveaxis(pair @ parameters["bias"], -1, 0)  # [N, L, L]
    mixed = attention(query, key, value, bias, present[None, None])
    gate = jax.nn.sigmoid(single @ parameters["gate"])
    return (gate * mixed.reshape(gate.shape)) @ parameters["out"]


def main():
    keys = jax.random.split(jax.random.key(0), 4)
    parameters = new_parameters(keys[0])
    single = jax.random.normal(keys[1], (RESIDUES, CHANNELS))
    pair = jax.random.normal(keys[2], (RESIDUES, RESIDUES, PAIR_CHANNELS))
    present = jax.random.bernoulli(keys[3], 0.9, (RESIDUES,))

    def loss(attention, parameters, single, pair):
        return (pair_attention(attention, parameters, single, pair, present) ** 2).mean()

    found, correct = (
        jax.jit(jax.value_and_grad(lambda *arrays, a=a: loss(a, *arrays), (0, 1, 2)))(
            parameters, single, pair
        )
        for a in (flash_attention, dense)
    )
    print(f"loss {found[0]:.6f}, by the formula {correct[0]:.6f}")
    errors = {"loss": float(jnp.abs(found[0] / correct[0] - 1))}
    names = ("parameters", "single", "pair")
    for name, a, b in zip(names, found[1], correct[1], strict=True):
        difference = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), a, b)
        errors[name] = max(map(float, jax.tree.leaves(difference)))
        print(f"gradient of {name}: relative difference {errors[name]:.1e}")
    errors["absent residues"] = float(jnp.abs(found[1][2][:, ~present]).max())
    print(f"gradient of pairs with residues that are not there: {errors['absent residues']}")
    return errors


if __name__ == "__main__":
    # No options but --help.
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
