"""A small language model with sliding windows and learned attention sinks.

    python examples/sliding_window.py

Each layer sees the last 16 tokens, so time grows with the length, not with its square. A sink is
one more logit a head, in the softmax's denominator only: where the window holds nothing of use, a
head can attend to nothing. The task is to say a token again 12 tokens later.
"""

import argparse

import jax
import jax.numpy as jnp

from jaxflash import flash_attention

WINDOW, DELAY = 16, 12
VOCABULARY, BATCH, LENGTH = 16, 8, 128
LAYERS, HEADS, HEAD_DIM = 2, 4, 16
WIDTH = HEADS * HEAD_DIM
STEPS, RATE = 100, 3e-3


def new_parameters(key):
    keys = iter(jax.random.split(key, 3 + 2 * LAYERS))

    def matrix(*shape):
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    return {
        "tokens": matrix(VOCABULARY, WIDTH),
        "positions": matrix(2 * DELAY, WIDTH),
        "layers": [
            {
                "qkv": matrix(WIDTH, 3 * WIDTH),
                "out": matrix(WIDTH, WIDTH),
                "sinks": jnp.zeros(HEADS),
            }
            for _ in range(LAYERS)
        ],
        "logits": matrix(WIDTH, VOCABULARY),
    }


def attend(layer, x):
    """Attention over the last `WINDOW` tokens, and each query's share that goes to the sink."""
    normed = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    query, key, value = jnp.split((normed @ layer["qkv"]).reshape(*x.shape[:2], -1, HEAD_DIM), 3, 2)
    output, log_sum_exp = flash_attention(
        query,
        key,
        value,
        is_causal=True,
        local_window_size=(WINDOW - 1, 0),
        sinks=layer["sinks"],
        return_residual=True,
    )
    sunk = jnp.exp(layer["sinks"] - log_sum_exp)  # the log-sum-exp includes the sink
    return output.reshape(x.shape) @ layer["out"], sunk


def model(parameters, tokens):
    positions = parameters["positions"][jnp.arange(tokens.shape[1]) % (2 * DELAY)]
    x = parameters["tokens"][tokens] + positions
    shares = []
    for layer in parameters["layers"]:
        change, sunk = attend(layer, x)
        x += change
        shares.append(sunk.mean((0, 1)))
    return x @ parameters["logits"], jnp.stack(shares)


def loss(parameters, tokens):
    logits, _ = model(parameters, tokens)
    guesses = jax.nn.log_softmax(logits[:, DELAY:])
    wanted = tokens[:, :-DELAY, None]
    return -jnp.take_along_axis(guesses, wanted, -1).mean()


@jax.jit
def step(parameters, moments, number):
    """One step of Adam on new random tokens."""
    tokens = jax.random.randint(
        jax.random.fold_in(jax.random.key(1), number), (BATCH, LENGTH), 0, VOCABULARY
    )
    value, gradient = jax.value_and_grad(loss)(parameters, tokens)
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g**2, second, gradient)

    def moved(p, m, v):
        m, v = m / (1 - 0.9 ** (number + 1)), v / (1 - 0.99 ** (number + 1))
        return p - RATE * m / (jnp.sqrt(v) + 1e-8)

    return jax.tree.map(moved, parameters, first, second), (first, second), value


def main():
    parameters = new_parameters(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    moments = zeros, zeros
    losses = []
    for number in range(STEPS):
        parameters, moments, value = step(parameters, moments, number)
        losses.append(float(value))
        if number % 20 == 0 or number == STEPS - 1:
            print(f"step {number}: loss {value:.3f} (guessing: {jnp.log(VOCABULARY):.3f})")
    tokens = jax.random.randint(jax.random.key(2), (BATCH, LENGTH), 0, VOCABULARY)
    _, shares = model(parameters, tokens)
    for number, (layer, share) in enumerate(zip(parameters["layers"], shares, strict=True)):
        print(f"layer {number}: sinks {layer['sinks'].round(2)}, their share {share.round(2)}")
    return losses


if __name__ == "__main__":
    # No options but --help.
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
