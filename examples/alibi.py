"""Learns ALiBi's slopes, with a bias of size S.

    python examples/alibi.py

ALiBi adds `-slope * (i - j)` to the logit of query i and key j. What is the same for all keys of a
query cancels in the softmax, so `slope * j` does the same: a bias `[1, N, 1, S]`, which is never
broadcast in memory, and whose gradient has that shape too. Slopes are learned from the outputs of a
layer with known ones.
"""

import argparse

import jax
import jax.numpy as jnp

from jaxflash import flash_attention

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 256, 8, 16
STEPS, RATE = 200, 0.05


def attend(log_slopes, query, key, value):
    bias = jnp.exp(log_slopes)[:, None, None] * jnp.arange(LENGTH)
    return flash_attention(query, key, value, bias[None], is_causal=True)


def main():
    query, key, value = jax.random.normal(jax.random.key(0), (3, BATCH, LENGTH, HEADS, HEAD_DIM))
    true_slopes = 2.0 ** -jnp.arange(1, HEADS + 1)  # those of ALiBi's paper
    wanted = attend(jnp.log(true_slopes), query, key, value)

    @jax.jit
    @jax.value_and_grad
    def loss(log_slopes):
        return ((attend(log_slopes, query, key, value) - wanted) ** 2).mean()

    log_slopes = jnp.full(HEADS, jnp.log(0.05))
    for step in range(STEPS):
        value_now, gradient = loss(log_slopes)
        if step % 40 == 0:
            print(f"step {step}: loss {value_now:.2e}")
        # Each head has a problem of its own: steps of one size, smaller and smaller.
        log_slopes -= RATE * (1 - step / STEPS) * jnp.sign(gradient)
    print("head   true  learned")
    learned_slopes = jnp.exp(log_slopes)
    for head, (true, learned) in enumerate(zip(true_slopes, learned_slopes, strict=True)):
        print(f"{head:4} {true:.4f}   {learned:.4f}")
    return {
        "loss": float(loss(log_slopes)[0]),
        "slopes": float(jnp.abs(learned_slopes / true_slopes - 1).max()),
    }


if __name__ == "__main__":
    # No options but --help.
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
