"""Draws the curves of several runs into one picture, and says how far apart they are.

Example:
    python examples/compare_curves.py runs/transformer-tiny-jaxflash runs/transformer-tiny-xla
"""

import argparse
import sys
from pathlib import Path

from common.curves import Curve, Metrics, plot


def describe_difference(one: Curve, other: Curve) -> str:
    """The mean and the largest difference in loss, over the steps that both curves have."""
    losses = dict(zip(other.step, other.loss, strict=True))
    pairs = zip(one.step, one.loss, strict=True)
    differences = [abs(loss - losses[step]) for step, loss in pairs if step in losses]
    if not differences:
        return "no step in common"
    return f"{sum(differences) / len(differences):.4f} (at most {max(differences):.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders with a metrics.json")
    parser.add_argument("--out", type=Path, default=Path("comparison.png"), help="the picture")
    options = parser.parse_args()

    runs = {}
    for folder in options.runs:
        path = folder / "metrics.json"
        if not path.is_file():
            sys.exit(f"error: no {path}: expected the folder of a finished run")
        runs[folder.resolve().name] = Metrics.read(path)

    (first_name, first), *others = runs.items()
    print(f"{first_name}: final validation loss {first.validation.loss[-1]:.4f}")
    for name, run in others:
        print(
            f"{name}: final validation loss {run.validation.loss[-1]:.4f}; mean difference from "
            f"{first_name}: {describe_difference(first.training, run.training)} in training, "
            f"{describe_difference(first.validation, run.validation)} in validation"
        )
    plot(runs, options.out)
    print(f"curves in {options.out}")


if __name__ == "__main__":
    main()
