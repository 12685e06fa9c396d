"""Draws the pictures of the documentation, of masks from calls of jaxflash itself."""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from jaxflash import flash_attention

T, S = 12, 16

# File name -> arguments.
MASKS = {
    "causal": {"is_causal": True},
    "causal-offset": {"is_causal": True, "query_offset": S - T},
    "window": {"local_window_size": (3, 1)},
    "causal-window": {"is_causal": True, "local_window_size": (3, None)},
    "lengths": {"query_seq_lengths": jnp.array([9]), "key_value_seq_lengths": jnp.array([11])},
    "segments": {
        "query_segment_ids": jnp.array([[0] * 5 + [1] * 4 + [2] * 3]),
        "key_value_segment_ids": jnp.array([[0] * 6 + [1] * 5 + [2] * 5]),
    },
    "mask": {"mask": jax.random.bernoulli(jax.random.key(1), 0.6, (1, 1, T, S))},
    "everything": {
        "is_causal": True,
        "query_offset": S - T,
        "local_window_size": (7, None),
        "query_segment_ids": jnp.array([[0] * 6 + [1] * 6]),
        "key_value_segment_ids": jnp.array([[0] * 9 + [1] * 7]),
    },
}


def visible(arguments: dict) -> np.ndarray:
    """Which keys each query sees: the weights that it gives to one-hot values."""
    zeros = jnp.zeros((1, T, 1, 4))
    value = jnp.eye(S)[None, :, None]
    weights = flash_attention(zeros, jnp.zeros((1, S, 1, 4)), value, **arguments)
    return np.asarray(weights[0, :, 0] > 0)


def draw_mask(arguments: dict, path: Path) -> None:
    """A square for each query and key, filled where the key is visible."""
    figure, axes = plt.subplots(figsize=(3.2, 2.6))
    axes.pcolormesh(
        visible(arguments), cmap="Blues", vmin=0, vmax=1.4, edgecolors="lightgrey", linewidth=0.5
    )
    axes.invert_yaxis()
    axes.set(xlabel="key", ylabel="query", aspect="equal")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def draw_tiles(path: Path) -> None:
    """The logits of a causal call in tiles: hidden, seen in part, seen whole."""
    figure, axes = plt.subplots(figsize=(4.4, 3.4))
    tiles, names = 6, ("skipped", "masked key by key", "no masking work")
    kind = np.fromfunction(lambda i, j: np.where(j > i, 0, np.where(j == i, 1, 2)), (tiles, tiles))
    colours = matplotlib.colors.ListedColormap(["white", "lightskyblue", "steelblue"])
    axes.pcolormesh(kind, cmap=colours, vmin=-0.5, vmax=2.5, edgecolors="grey")
    axes.invert_yaxis()
    axes.set(xlabel="tiles of keys", ylabel="tiles of queries", aspect="equal")
    axes.set(xticks=[], yticks=[])
    patches = [
        matplotlib.patches.Patch(facecolor=colours(i), edgecolor="grey", label=name)
        for i, name in enumerate(names)
    ]
    axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def draw_all(folder: Path) -> None:
    """Writes all pictures as SVG."""
    folder.mkdir(exist_ok=True)
    for name, arguments in MASKS.items():
        draw_mask(arguments, folder / f"{name}.svg")
    draw_tiles(folder / "tiles.svg")
