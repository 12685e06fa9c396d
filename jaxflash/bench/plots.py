"""Pictures of results: speed over length, memory over length, roofline. They need matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxflash.bench.problems import DIRECTIONS, Direction, problem_of
from jaxflash.bench.report import contenders, distinguishing, label, of_direction, unit
from jaxflash.bench.results import Row, why_pure_jax

COLORS = [
    *(f"tab:{color}" for color in ("blue", "orange", "green", "red", "purple", "brown", "pink")),
    *("0.45", "tab:olive", "tab:cyan", "black"),
]
MARKS = {"forward": "o", "backward": "s"}
MOST_PANELS = 4


@dataclass(frozen=True)
class Quantity:
    """What is drawn over length.

    Attributes:
      title: what it is; the machine is added.
      unit: of the axis.
      of: its value for a contender in a row of results; None where it is not known.
      directions: what a panel of each direction is called.
      most: the value that can't be passed, of a row.
    """

    title: str
    unit: str
    of: Callable[[Row, str], float | None]
    directions: dict[Direction, str]
    most: Callable[[Row], float | None] | None = None


def _figure(width: float, height: float, columns: int, rows: int = 1, **settings: Any) -> Any:
    """A figure and its panels `[rows, columns]`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(
        rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **settings
    )


def _color(name: str, names: Sequence[str]) -> str:
    return COLORS[names.index(name) % len(COLORS)]


def _where(group: dict[str, Any]) -> str:
    cores = f"{group['cores']} cores of " if group.get("cores") else ""
    return f"{cores}{group['device']}"


def _finish(figure: Any, axes: Any, title: str, path: Path) -> None:
    """Adds what panels share, and writes the picture."""
    entries: dict[str, Any] = {}
    for ax in axes.flat:
        handles, names = ax.get_legend_handles_labels()
        entries |= dict(zip(names, handles, strict=True))
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _kinds(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each kind of problem, whatever the mask and the length."""
    names = [name for name in distinguishing(rows) if name != "is_causal"]
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(label(row, names), []).append(row)
    return kinds


def _draw(group: dict[str, Any], path: Path, quantity: Quantity) -> None:
    """Draws lines over length, or bars where there is one length only."""
    several = len({row["length"] for row in group["rows"]}) > 1
    figure, axes = (_lines if several else _bars)(group["rows"], quantity)
    title, kinds = f"{quantity.title}, {_where(group)}", len(_kinds(group["rows"]))
    if several and kinds > MOST_PANELS:
        title += f"\n(the first {MOST_PANELS} of {kinds} kinds of problems)"
    _finish(figure, axes, title, path)


def _lines(rows: Sequence[Row], quantity: Quantity) -> tuple[Any, Any]:
    """A line for each contender and mask: a panel for each direction and kind of problem."""
    names, kinds = contenders(rows), dict(list(_kinds(rows).items())[:MOST_PANELS])
    figure, axes = _figure(9.5, 1.2 + 2.6 * len(kinds), 2, len(kinds), sharex=True, sharey=True)
    for of_kind, (kind, panel) in zip(axes, kinds.items(), strict=True):
        for ax, direction in zip(of_kind, DIRECTIONS, strict=True):
            here = of_direction(panel, direction)
            for name in names:
                _line(ax, here, name, _color(name, names), quantity)
            _draw_most(ax.axhline, here, quantity)
            lengths = sorted({row["length"] for row in here})
            ax.set_xscale("log", base=2)
            ax.set_xticks(lengths, [str(length) for length in lengths])
            ax.minorticks_off()
            ax.set_title(", ".join(filter(None, (quantity.directions[direction], kind))))
        of_kind[0].set_ylabel(quantity.unit)
        _scale(of_kind[0], "y", quantity)
    for ax in axes[-1]:
        ax.set_xlabel("sequence length")
    return figure, axes


def _line(ax: Any, rows: Iterable[Row], name: str, color: str, quantity: Quantity) -> None:
    for is_causal, style in ((False, "-"), (True, "--")):
        points = {
            row["length"]: y
            for row in rows
            if row["is_causal"] == is_causal and (y := quantity.of(row, name)) is not None
        }
        if points:
            lengths = sorted(points)
            said = f"{name}, {'causal' if is_causal else 'full'}"
            ax.plot(lengths, [points[n] for n in lengths], style, marker="o", ms=4, color=color,
                    label=said)  # fmt: skip


def _bars(rows: Sequence[Row], quantity: Quantity) -> tuple[Any, Any]:
    """A bar for each contender and problem: a panel for each direction."""
    names, attributes = contenders(rows), distinguishing(rows)
    labels = list(dict.fromkeys(label(row, attributes) for row in rows))
    height = 0.8 / len(names)
    size = 1.6 + 0.25 * len(labels) * max(2, len(names))
    figure, axes = _figure(9.5, size, 2, sharex=True, sharey=True)
    for ax, direction in zip(axes[0], DIRECTIONS, strict=True):
        here = of_direction(rows, direction)
        for place, name in enumerate(names):
            values = [quantity.of(row, name) or 0 for row in here]
            y = [labels.index(label(row, attributes)) + (place + 0.5) * height for row in here]
            ax.barh(y, values, height, color=_color(name, names), label=name)
        _draw_most(ax.axvline, here, quantity)
        ax.set_yticks([place + 0.4 for place in range(len(labels))], labels)
        ax.set_title(quantity.directions[direction])
        ax.set_xlabel(quantity.unit)
        _scale(ax, "x", quantity)
    axes[0, 0].invert_yaxis()
    return figure, axes


def _draw_most(line: Callable[..., Any], rows: Iterable[Row], quantity: Quantity) -> None:
    known = [most for row in rows if quantity.most and (most := quantity.most(row))]
    if known:
        most = statistics.median(known)
        line(most, color="black", linewidth=1, linestyle=":", label="matrix product")


def _scale(ax: Any, axis: str, quantity: Quantity) -> None:
    """From zero where there is a most, else logarithmic."""
    if quantity.most:
        ax.set(**{f"{axis}lim": (0, None)})
    else:
        ax.set(**{f"{axis}scale": "log"})


def _right(row: Row) -> dict[str, float]:
    """The rates of those whose results were right: how fast others are says nothing."""
    return {name: rate for name, rate in row["tflops"].items() if name not in row["wrong"]}


def _remarks(rows: Sequence[Row]) -> str:
    """What must not be missed, in brackets."""
    remarks: list[str] = []
    if any(row["wrong"] for row in rows):
        remarks.append("who was wrong is left out")
    if any(map(why_pure_jax, rows)):
        remarks.append("jaxflash in pure JAX, not its kernels")
    return f" ({'; '.join(remarks)})" if remarks else ""


def draw_speed(group: dict[str, Any], path: Path) -> None:
    """Draws the rate over length, and that of a matrix product."""
    name, factor = unit(group["rows"])

    def rate(row: Row, contender: str) -> float | None:
        tflops = _right(row).get(contender)
        return tflops and tflops * factor

    def of_matmul(row: Row) -> float | None:
        return row["matmul_tflops"] and row["matmul_tflops"] * factor

    title = f"Speed of attention{_remarks(group['rows'])}"
    directions: dict[Direction, str] = {"forward": "forward", "backward": "backward"}
    _draw(group, path, Quantity(title, name, rate, directions, of_matmul))


def draw_memory(group: dict[str, Any], path: Path) -> None:
    """Draws what is set aside beside operands and results, over length."""

    def mib(row: Row, contender: str) -> float | None:
        size = row["memory"].get(contender, {}).get("workspace_bytes")
        return size and size / 2**20

    title = "Memory of attention beside operands and results"
    directions: dict[Direction, str] = {"forward": "forward", "backward": "forward and backward"}
    _draw(group, path, Quantity(title, "MiB", mib, directions))


def draw_roofline(group: dict[str, Any], path: Path) -> None:
    """Draws rates over arithmetic intensity, below what memory and matrix products allow."""
    rows, bandwidth = group["rows"], group.get("bytes_per_second")
    names, (name, factor) = contenders(rows), unit(rows)
    figure, axes = _figure(9.5, 4.5, 1)
    ax = axes[0, 0]
    intensities: list[float] = []
    for row in rows:
        problem = problem_of(row)
        intensity = problem.flops(row["direction"]) / problem.bytes_moved(row["direction"])
        intensities.append(intensity)
        for contender, tflops in _right(row).items():
            ax.plot(intensity, tflops * factor, MARKS[row["direction"]], ms=5, alpha=0.7,
                    color=_color(contender, names),
                    label=f"{contender}, {row['direction']}")  # fmt: skip
    most = max((row["matmul_tflops"] or 0 for row in rows), default=0)
    if most and bandwidth:
        knee = most * 1e12 / bandwidth
        x = [min(*intensities, knee) / 2, knee, 2 * max(*intensities, knee)]
        y = [bandwidth * x[0] / 1e12 * factor, most * factor, most * factor]
        ax.plot(x, y, color="black", linewidth=1, label="memory's rate, matrix product's rate")
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    ax.tick_params(axis="x", which="minor", labelbottom=False)
    ax.set_xlabel("FLOP to a byte that has to move")
    ax.set_ylabel(name)
    _finish(figure, axes, f"Roofline of {_where(group)}{_remarks(rows)}", path)


PICTURES = {"speed": draw_speed, "memory": draw_memory, "roofline": draw_roofline}


def draw(group: dict[str, Any], stem: Path) -> list[Path]:
    """Draws every picture of a group that was measured.

    Returns:
      The files: `stem`, with the picture's name at its end.
    """
    if not contenders(group["rows"]):
        return []
    paths: list[Path] = []
    for name, picture in PICTURES.items():
        paths.append(stem.with_name(f"{stem.name}-{name}.png"))
        picture(group, paths[-1])
    return paths
