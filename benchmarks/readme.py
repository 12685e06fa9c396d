"""Puts the tables and pictures of results of `python -m jaxflash.bench` into the README.

    python benchmarks/readme.py benchmarks/results/cpu-<model>-<date>.json ...

A file is for the README's marker with which its name begins. Without files: the newest of each.
"""

import re
import sys
from pathlib import Path

from jaxflash.bench.report import speed_summary
from jaxflash.bench.results import Results, read

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- benchmark: {} -->\n", "<!-- end of benchmark -->"
KINDS = ("cpu", "gpu")


def newest_results(kind: str) -> Path:
    """Returns the newest results file of "cpu" or "gpu": the names end with their date."""
    return max(RESULTS.glob(f"{kind}-*.json"), key=lambda path: path.stem[-10:])


def with_tables(readme: str, kind: str, results: Results) -> str:
    """Returns the README's text with what is between its markers of `kind` replaced."""
    begin = BEGIN.format(kind)
    before, rest = readme.split(begin)
    _, after = rest.split(END, 1)
    return f"{before}{begin}{speed_summary(results)}\n{END}{after}"


def draw(kind: str, results: Results) -> list[Path]:
    """Draws the pictures that the README shows."""
    # Imported here, so that the test of the tables does not need matplotlib.
    from jaxflash.bench.plots import PICTURES

    shown = re.findall(rf"benchmarks/results/{kind}-(.+)-(\w+)\.png", README.read_text())
    paths: list[Path] = []
    for group, picture in shown:
        paths.append(RESULTS / f"{kind}-{group}-{picture}.png")
        PICTURES[picture](results["groups"][group], paths[-1])
    return paths


def main(arguments: list[str]) -> None:
    for path in map(Path, arguments) if arguments else map(newest_results, KINDS):
        results, kind = read(path), path.stem.split("-")[0]
        README.write_text(with_tables(README.read_text(), kind, results))
        print(path, *draw(kind, results))


if __name__ == "__main__":
    main(sys.argv[1:])
