"""Pictures of results: speed over length, memory over length, roofline. They need matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxflash.bench.problems import DIRECTIONS, problem_of
from jaxflash.bench.report import contenders, distinguishing, label, of_direction, unit
from jaxflash.bench.results import Row

COLORS = ("tab:blue", "0.45", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
MARKS = {"forward": "o", "backward": "s"}
TITLES = {"forward": "forward", "backward": "backward"}
MEMORY_TITLES = {"forward": "forward", "backward": "forward and backward"}
MOST_PANELS = 4


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


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each kind of problem, masks apart; of many kinds the first ones."""
    names = [name for name in distinguishing(rows) if name != "is_causal"]
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(label(row, names), []).append(row)
    return dict(sorted(panels.items())[:MOST_PANELS])


def _draw_over_length(
    group: dict[str, Any],
    path: Path,
    value: Callable[[Row, str], float | None],
    titles: dict[str, str],
    decorate: Callable[[Any, Sequence[Row]], None],
    title: str,
) -> None:
    """Draws a line for each contender and mask: a panel for each direction and kind of problem."""
    rows = group["rows"]
    names, panels = contenders(rows), _panels(rows)
    figure, axes = _figure(9.5, 1.2 + 2.6 * len(panels), 2, len(panels), sharex=True, sharey=True)
    for of_kind, (kind, panel) in zip(axes, panels.items(), strict=True):
        for ax, direction in zip(of_kind, DIRECTIONS, strict=True):
            here = of_direction(panel, direction)
            for name in names:
                _draw_lines(ax, here, name, _color(name, names), value)
            ax.set_xscale("log", base=2)
            lengths = sorted({row["length"] for row in here})
            ax.set_xticks(lengths, [str(length) for length in lengths])
            ax.minorticks_off()
            ax.set_title(", ".join(filter(None, (titles[direction], kind))))
            decorate(ax, here)
    for ax in axes[-1]:
        ax.set_xlabel("sequence length")
    _finish(figure, axes, title, path)


def _draw_lines(
    ax: Any, rows: Iterable[Row], name: str, color: str, value: Callable[[Row, str], float | None]
) -> None:
    for is_causal, style in ((False, "-"), (True, "--")):
        points = {
            row["length"]: y
            for row in rows
            if row["is_causal"] == is_causal and (y := value(row, name)) is not None
        }
        if points:
            lengths = sorted(points)
            said = f"{name}, {'causal' if is_causal else 'full'}"
            ax.plot(lengths, [points[n] for n in lengths], style, marker="o", ms=4, color=color,
                    label=said)  # fmt: skip


def draw_speed(group: dict[str, Any], path: Path) -> None:
    """Draws the rate over length, and that of a matrix product."""
    name, factor = unit(group["rows"])

    def rate(row: Row, contender: str) -> float | None:
        tflops = row["tflops"].get(contender)
        return tflops and tflops * factor

    def decorate(ax: Any, rows: Sequence[Row]) -> None:
        most = sorted(row["matmul_tflops"] for row in rows if row["matmul_tflops"])
        if most:
            ax.axhline(most[len(most) // 2] * factor, color="black", linewidth=1, linestyle=":",
                       label="matrix product")  # fmt: skip
        ax.set_ylim(0)
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel(name)

    title = f"Speed of attention on {_where(group)}"
    _draw_over_length(group, path, rate, TITLES, decorate, title)


def draw_memory(group: dict[str, Any], path: Path) -> None:
    """Draws what is set aside beside operands and results, over length."""

    def mib(row: Row, contender: str) -> float | None:
        size = row["memory"].get(contender, {}).get("workspace_bytes")
        return size and size / 2**20

    def decorate(ax: Any, rows: Sequence[Row]) -> None:
        ax.set_yscale("log")
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("MiB")

    title = f"Memory that attention needs beside operands and results, {_where(group)}"
    _draw_over_length(group, path, mib, MEMORY_TITLES, decorate, title)


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
        for contender, tflops in row["tflops"].items():
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
    _finish(figure, axes, f"Roofline of {_where(group)}", path)


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
