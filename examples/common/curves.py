"""A run's losses: as JSON, and as a picture."""

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file is written, no display needed
from matplotlib import pyplot


@dataclass
class Curve:
    """Losses in nats a byte after `step` updates."""

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def append(self, step: int, loss: float) -> None:
        self.step.append(step)
        self.loss.append(loss)


@dataclass
class Metrics:
    """What is known of a run; no times, so that equal runs have equal files.

    Attributes:
        settings: `Settings.as_dict()`.
        unigram_entropy: of the validation text, nats a byte.
        training: the loss of each step's rows, before its update.
        validation: the loss on held-out files.
    """

    settings: dict[str, Any]
    unigram_entropy: float
    training: Curve = field(default_factory=Curve)
    validation: Curve = field(default_factory=Curve)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Metrics":
        return cls(
            settings=values["settings"],
            unigram_entropy=values["unigram_entropy"],
            training=Curve(**values["training"]),
            validation=Curve(**values["validation"]),
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Metrics":
        return cls.from_dict(json.loads(path.read_text()))


def plot(runs: dict[str, Metrics], path: Path) -> None:
    """Draws the curves of one or several runs into one PNG.

    Args:
        runs: metrics by label.
        path: of the picture.
    """
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    # Every run has its own colour, dashes and marker: curves that agree lie on each other.
    styles = itertools.cycle(itertools.product("-:", "o+xs"))
    for (label, run), (dashes, marker) in zip(runs.items(), styles, strict=False):
        (line,) = axes.plot(run.training.step, run.training.loss, dashes, lw=0.8, alpha=0.5)
        axes.plot(
            run.validation.step, run.validation.loss, dashes, marker=marker,
            color=line.get_color(), label=f"{label}: validation (thin: training)",
        )  # fmt: skip
    for entropy in {run.unigram_entropy for run in runs.values()}:
        label = f"unigram entropy of the validation bytes: {entropy:.2f}"
        axes.axhline(entropy, color="black", ls="--", lw=1, label=label)
    axes.set(xlabel="step (updates)", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
