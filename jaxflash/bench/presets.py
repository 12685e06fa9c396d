"""Groups of problems: those that papers and models made known, and those of a laptop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxflash.bench.problems import FEATURES, Problem

TOKENS, HIDDEN = 16384, 2048
MASKS = (False, True)


@dataclass(frozen=True)
class Group:
    """Problems that are reported together.

    Attributes:
      title: what they have in common.
      problems: the most important first, for when the time is short.
      contenders: who solves them. None: all that are installed.
    """

    title: str
    problems: Sequence[Problem]
    contenders: Sequence[str] | None = None


@dataclass(frozen=True)
class Preset:
    """A group for the lengths that are asked for.

    Attributes:
      title: see `Group`; the tokens of a batch come before it where `says_tokens`.
      lengths: those by default, the most important first.
      problems: the problems of one length.
      contenders: see `Group`.
      says_tokens: whether problems have as many tokens as each other, where lengths allow it.
    """

    title: str
    lengths: Sequence[int]
    problems: Callable[[int], Iterable[Problem]]
    contenders: Sequence[str] | None = None
    says_tokens: bool = False

    def group(self, lengths: Sequence[int] | None = None) -> Group:
        """Returns its problems of the given lengths, or of its own."""
        problems = [p for length in lengths or self.lengths for p in self.problems(length)]
        title = f"{_tokens(problems)}, {self.title}" if self.says_tokens else self.title
        return Group(title, problems, self.contenders)


def _tokens(problems: Iterable[Problem]) -> str:
    """How many tokens the batches of problems hold."""
    counts = {problem.batch * problem.length for problem in problems}
    least, most = min(counts), max(counts)
    return f"{most} tokens" if least == most else f"{least} to {most} tokens"


def training(length: int, head_dim: int, **settings: Any) -> Problem:
    """A problem of the size that FlashAttention's papers have."""
    return Problem(max(1, TOKENS // length), length, HIDDEN // head_dim, head_dim, **settings)


def _laptop(length: int, dtypes: Sequence[str] = ("float32",)) -> Iterable[Problem]:
    return [Problem(1, length, 8, 64, dtype, causal) for dtype in dtypes for causal in MASKS]


def _cpu(length: int) -> Iterable[Problem]:
    return _laptop(length, ("float32", "bfloat16"))


def _fa3(length: int) -> Iterable[Problem]:
    return [training(length, h, is_causal=causal) for h in (64, 128, 256) for causal in MASKS]


def _triton_tutorial(length: int) -> Iterable[Problem]:
    return [
        Problem(4, length, 48, head_dim, "float16", causal)
        for head_dim in (64, 128, 16)
        for causal in MASKS
    ]


def _gpt2(length: int) -> Iterable[Problem]:
    return [Problem(16, length, 12, 64, is_causal=True)]


def _long(length: int) -> Iterable[Problem]:
    return [
        Problem(1, length, 16, 128, is_causal=True),
        Problem(1, length, 16, 128, is_causal=True, window=4096),
    ]


def _float32(length: int) -> Iterable[Problem]:
    return [
        Problem(4, length, HIDDEN // head_dim, head_dim, "float32", causal)
        for head_dim in (64, 128)
        for causal in MASKS
    ]


def _features(length: int) -> Iterable[Problem]:
    return [training(length, head_dim, feature=f) for head_dim in (64, 128) for f in FEATURES]


def _small(length: int) -> Iterable[Problem]:
    return [
        Problem(batch, length, 8, head_dim, is_causal=causal, repeats=16)
        for batch in (1, 4)
        for head_dim in (64, 128)
        for causal in MASKS
    ]


FA3_TITLE = "hidden size 2048, bfloat16"
PRESETS: dict[str, Preset] = {
    "laptop": Preset("B=1, N=8, H=64, float32", (1024, 512, 2048), _laptop),
    "cpu": Preset("B=1, N=8, H=64", (2048, 512, 4096), _cpu),
    "fa3": Preset(FA3_TITLE, (1024, 8192, 512, 2048, 4096, 16384), _fa3, says_tokens=True),
    "triton-tutorial": Preset(
        "the Triton tutorial's B=4, N=48, float16",
        (1024, 8192, 2048, 4096, 16384),
        _triton_tutorial,
    ),
    "gpt2": Preset("GPT-2's heads: B=16, N=12, H=64, bfloat16", (1024, 256, 512), _gpt2),
    "long": Preset("B=1, N=16, H=128, bfloat16", (16384, 65536, 32768), _long),
    "float32": Preset("float32, B=4, hidden size 2048", (4096,), _float32),
    "features": Preset(
        FA3_TITLE,
        (4096,),
        _features,
        ("jaxflash", "jax.nn cudnn", "jax.nn xla", "dense"),
        says_tokens=True,
    ),
    "small": Preset("few heads, N=8, bfloat16, 16 calls in a program", (512, 256, 1024), _small),
}
"""By the name of `--preset`."""

DEFAULT_PRESET = {"cpu": "laptop", "gpu": "fa3"}
"""By platform; elsewhere "laptop"."""
