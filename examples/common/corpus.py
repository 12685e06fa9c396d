"""Text that every machine has: the source of the Python standard library, as bytes.

A document is a file with one `START` byte before it. The documents of a split follow each other in
one long stream, and a row of a batch is a window of this stream: where a file ends in it, the next
begins, so that rows are packed and need no padding. `locate_documents` tells the documents apart.
"""

import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

START = 0
"""The token before a document. Python source may not contain this byte, so that it is free."""

VOCABULARY = 256

VALIDATION_SHARE = 0.1
"""Of the files."""

# Tests and installed packages differ between machines; tables made by machine are no text.
EXCLUDED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """Streams of documents, one token a byte.

    Attributes:
        training: uint8 `[bytes]`.
        validation: uint8 `[bytes]`, from other files than `training`.
    """

    training: np.ndarray
    validation: np.ndarray


def read_corpus(folder: Path | None = None) -> Corpus:
    """Reads the Python files under `folder` and splits them by file.

    Args:
        folder: default: the standard library of the Python that runs this.

    Raises:
        FileNotFoundError: there is no Python source for one of the splits.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    splits: dict[bool, list[bytes]] = {False: [], True: []}
    files = (path for path in folder.rglob("*.py") if path.is_file())  # links may lead nowhere
    for name in sorted(path.relative_to(folder).as_posix() for path in files):
        if EXCLUDED_FOLDERS.isdisjoint(name.split("/")):
            text = (folder / name).read_bytes()
            if START not in text:
                splits[_is_validation(name)].append(text)
    if not all(splits.values()):
        raise FileNotFoundError(
            f"expected the standard library's source (*.py) under {folder}, found "
            f"{len(splits[False])} training and {len(splits[True])} validation files"
        )
    return Corpus(training=_stream(splits[False]), validation=_stream(splits[True]))


def _is_validation(name: str) -> bool:
    """Depends on the file's name only: the same on every machine, whichever other files it has."""
    return zlib.crc32(name.encode()) < VALIDATION_SHARE * 2**32


def _stream(documents: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(bytes([START]) + text for text in documents), np.uint8)


def unigram_entropy(stream: np.ndarray) -> float:
    """Loss, in nats a byte, of the best model of `stream` that ignores context: the yardstick."""
    counts = np.bincount(stream[stream != START])
    probabilities = counts[counts > 0] / counts.sum()
    return float(-np.sum(probabilities * np.log(probabilities)))


def training_rows(stream: np.ndarray, seed: int, step: int, batch: int, length: int) -> np.ndarray:
    """Rows for one training step: a pure function of seed and step, so that a run can resume.

    Returns:
        uint8 `[batch, length + 1]`: `length` inputs and, shifted by one, `length` targets.
    """
    random = np.random.default_rng((seed, step))
    return _rows(stream, random.integers(0, len(stream) - length, batch), length)


def validation_rows(stream: np.ndarray, count: int, length: int) -> np.ndarray:
    """`count` rows spread evenly over the stream, uint8 `[count, length + 1]`."""
    return _rows(stream, np.linspace(0, len(stream) - length - 1, count).astype(int), length)


def _rows(stream: np.ndarray, first: np.ndarray, length: int) -> np.ndarray:
    return stream[first[:, None] + np.arange(length + 1)]


def locate_documents(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the documents packed in each row.

    Args:
        tokens: integers `[..., length]`.

    Returns:
        segment_ids: int32 `[..., length]`, equal where two tokens of a row share a document.
        positions: int32 `[..., length]`, counted from the document's first token in the row.
    """
    is_start = tokens == START
    axis = tokens.ndim - 1
    segment_ids = jnp.cumsum(is_start, axis, dtype=jnp.int32)
    index = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    positions = index - jax.lax.cummax(jnp.where(is_start, index, 0), axis)
    return segment_ids, positions
