"""Tables of results, in Markdown that reads well in a terminal too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxflash.bench.contenders import OURS
from jaxflash.bench.problems import DIRECTIONS, Direction
from jaxflash.bench.results import Results, Row, best_rival, why_pure_jax

WORDS: dict[str, Callable[[Any], str]] = {
    "dtype": str,
    "head_dim": "H={}".format,
    "heads": "N={}".format,
    "kv_heads": lambda heads: f"K={heads or 'N'}",
    "batch": "B={}".format,
    "window": lambda window: "any distance" if window is None else f"window {window}",
    "feature": str,
    "repeats": "{} calls".format,
    "is_causal": lambda is_causal: "causal" if is_causal else "full",
}
"""How what distinguishes problems of one length is said."""


def table(header: Sequence[str], lines: Iterable[Sequence[str]], *, left: int) -> str:
    """Returns a Markdown table with padded cells.

    Args:
      header: names of the columns.
      lines: the cells.
      left: how many columns, the first ones, are aligned on the left.
    """
    cells = [list(header), *map(list, lines)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = [
        "-" * width if place < left else "-" * (width - 1) + ":"
        for place, width in enumerate(widths)
    ]

    def padded(place: int, cell: str) -> str:
        return cell.ljust(widths[place]) if place < left else cell.rjust(widths[place])

    return "\n".join(
        f"| {' | '.join(padded(place, cell) for place, cell in enumerate(line))} |"
        for line in (cells[0], rule, *cells[1:])
    )


def distinguishing(rows: Sequence[Row]) -> list[str]:
    """Returns the attributes in which problems of one length differ, and always causality."""

    def differs(name: str) -> bool:
        values: dict[int, set[Any]] = {}
        for row in rows:
            values.setdefault(row["length"], set()).add(row[name])
        return any(len(of_length) > 1 for of_length in values.values())

    return [name for name in WORDS if name == "is_causal" or differs(name)]


def label(row: Row, names: Iterable[str]) -> str:
    """Returns the attributes of a row's problem in words."""
    return ", ".join(WORDS[name](row[name]) for name in names)


def unit(rows: Iterable[Row]) -> tuple[str, float]:
    """Returns the unit of rates that gives readable numbers, and how many make a TFLOP/s."""
    fastest = max((rate for row in rows for rate in row["tflops"].values()), default=0)
    return ("TFLOP/s", 1.0) if fastest > 2 else ("GFLOP/s", 1000.0)


def contenders(rows: Iterable[Row]) -> list[str]:
    """Returns who was measured at least once, jaxflash first."""
    names = dict.fromkeys(name for row in rows for name in row["times"])
    return sorted(names, key=lambda name: name != OURS)


def of_direction(rows: Iterable[Row], direction: Direction) -> list[Row]:
    """Returns the rows of one direction."""
    return [row for row in rows if row["direction"] == direction]


def conditions(group: dict[str, Any]) -> str:
    """Returns where and of what a group was measured, in a sentence."""
    device = group["device"]
    if group.get("cores"):
        device += f", {group['cores']} cores ({group['instruction_set']})"
    versions = [
        f"{name} {group[name]}"
        for name in ("driver", "cuda", "cudnn", "jax")
        if group.get(name) and not (group["platform"] == "cpu" and name != "jax")
    ]
    parts = [device, *versions, group["date"]]
    if group.get("commit"):
        parts.append(f"commit {group['commit']}")
    return f"{group['title']}. {', '.join(parts)}."


def summary(results: Results) -> str:
    """Returns tables of jaxflash's speed and memory over length, for every group."""
    return _of_groups(
        results,
        lambda rows: [speed(rows), memory_table(rows), *not_measured(rows), *absences(rows)],
    )


def speed_summary(results: Results) -> str:
    """Returns the tables of speed alone."""
    return _of_groups(results, lambda rows: [speed(rows)])


def _of_groups(results: Results, parts: Callable[[Sequence[Row]], list[str]]) -> str:
    return "\n\n".join(
        "\n\n".join(filter(None, [f"**{name}**: {conditions(group)}", *parts(group["rows"])]))
        for name, group in results["groups"].items()
    )


def speed(rows: Sequence[Row]) -> str:
    """Returns the table of speed, and what is to be said about it."""
    ratios = [mean_ratio(rows, rival) for rival in contenders(rows) if rival != OURS]
    parts = [*in_pure_jax(rows), speed_table(rows), *ratios, largest_errors(rows)]
    return "\n\n".join(filter(None, parts))


def over_length(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """Returns a table with a column for each length and a line for each other problem."""
    names = distinguishing(rows)
    lengths = sorted({row["length"] for row in rows})
    lines: dict[tuple[str, str], dict[int, str]] = {}

    def place(row: Row) -> Any:
        return row["direction"] != "forward", [
            (isinstance(row[name], str), row[name] or 0) for name in names
        ]

    for row in sorted(rows, key=place):
        line = lines.setdefault((row["direction"], label(row, names)), {})
        line[row["length"]] = cell(row)
    return table(
        ["direction", "problem", *map(str, lengths)],
        [[*line, *(cells.get(length, "") for length in lengths)] for line, cells in lines.items()],
        left=2,
    )


def marked(row: Row, name: str, text: str | None) -> str:
    """Returns a dash for who is absent, an ! after who is wrong."""
    return (text or "-") + ("!" if name in row["wrong"] else "")


def speed_table(rows: Sequence[Row]) -> str:
    """Returns jaxflash's rate, how many times as fast as the best rival, and share of a matmul."""
    name, factor = unit(rows)
    rivals = ", ".join(rival for rival in contenders(rows) if rival != OURS)

    def cell(row: Row) -> str:
        rate, best, most = row["tflops"].get(OURS), best_rival(row), row["matmul_tflops"]
        parts = []
        if best:
            parts.append(f"{row['ratio'][best]:.2f}x")
        if rate and most:
            parts.append(f"{rate / most:.0%}")
        star = "*" if why_pure_jax(row) else ""
        text = marked(row, OURS, rate and f"{rate * factor:.3g}{star}")
        return f"{text} ({', '.join(parts)})" if parts else text

    brackets = []
    if rivals:
        brackets.append(f"how many times as fast as the best of: {rivals}")
    if any(row["matmul_tflops"] for row in rows):
        brackets.append("share of a large matrix product's rate in the same run")
    said = f"{name} of jaxflash" + (f" ({'; '.join(brackets)})" if brackets else "")
    marks = "- absent, ! wrong result"
    if any(map(why_pure_jax, rows)):
        marks += ", * pure JAX, not the kernels"
    return f"{said}; {marks}:\n\n{over_length(rows, cell)}"


def memory_table(rows: Sequence[Row]) -> str:
    """Returns what each contender needs beside operands and results, empty where unknown."""
    names = [name for name in contenders(rows) if any(row["memory"].get(name) for row in rows)]
    if not names:
        return ""

    def cell(row: Row) -> str:
        sizes = (row["memory"].get(name, {}).get("workspace_bytes") for name in names)
        return " / ".join("-" if size is None else mebibytes(size) for size in sizes)

    return (
        f"MiB (where no other unit stands) that XLA sets aside beside operands and results, "
        f"{' / '.join(names)} "
        f"(backward: output and gradients in one program):\n\n{over_length(rows, cell)}"
    )


def mebibytes(size: int) -> str:
    """Returns a size in MiB, without the unit; with another unit where that is unreadably small."""
    if size == 0:
        return "0"
    if size < 1024:
        return f"{size} B"
    if size < 0.01 * 2**20:
        return f"{size / 1024:.3g} KiB"
    return f"{size / 2**20:.3g}" if size < 1000 * 2**20 else f"{size / 2**20:.0f}"


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def mean_ratio(rows: Sequence[Row], rival: str) -> str:
    """Returns a line about a rival, of the rows where both it and jaxflash have right results."""
    ratios: dict[str, list[float]] = {}
    for direction in DIRECTIONS:
        ratios[direction] = [
            row["ratio"][rival]
            for row in of_direction(rows, direction)
            if rival in row["ratio"] and not {rival, OURS} & set(row["wrong"])
        ]
    parts = [
        f"{direction} {geometric_mean(values):.2f} (least {min(values):.2f})"
        for direction, values in ratios.items()
        if values
    ]
    means = ", ".join(parts) or "both were never right"
    return f"Times as fast as {rival}, geometric mean: {means}."


def largest_errors(rows: Sequence[Row]) -> str:
    """Returns a line of how wrong each contender was."""
    largest: dict[str, float] = {}
    for row in rows:
        for name, errors in row["errors"].items():
            largest[name] = max(largest.get(name, 0.0), *errors.values())
    errors = (f"{name} {error:.1e}" for name, error in largest.items())
    return f"Largest relative error: {', '.join(errors)}." if largest else ""


def absences(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each reason why some are absent from some problems."""
    reasons = [(row["direction"], name, why) for row in rows for name, why in row["absent"].items()]
    return [f"Absent from {line}" for line in _by_reason(reasons)]


def in_pure_jax(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each reason why what was timed as jaxflash is not its kernels."""
    reasons = [(row["direction"], OURS, why) for row in rows if (why := why_pure_jax(row))]
    return [f"Warning: pure JAX, not the kernels, in {line}" for line in _by_reason(reasons)]


def not_measured(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each reason why the memory of some was not measured."""
    reasons = [
        (row["direction"], name, memory["not_measured"])
        for row in rows
        for name, memory in row["memory"].items()
        if "not_measured" in memory and name not in row["absent"]
    ]
    return [f"Memory not measured in {line}" for line in _by_reason(reasons)]


def _by_reason(reasons: Iterable[tuple[str, str, str]]) -> list[str]:
    """Lines of directions, names and why; those for whom all of it is the same share one."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for direction, name, why in reasons:
        of_one = counts.setdefault((name, why), {})
        of_one[direction] = of_one.get(direction, 0) + 1
    names: dict[tuple[str, str], list[str]] = {}
    for (name, why), count in counts.items():
        where = " and ".join(f"{number} {direction}" for direction, number in count.items())
        names.setdefault((where, why), []).append(name)
    return [f"{where}: {', '.join(of_one)}: {why}" for (where, why), of_one in names.items()]


def details(rows: Sequence[Row]) -> str:
    """Returns a table with a line for each contender of each problem."""
    names = distinguishing(rows)
    rate_unit, factor = unit(rows)
    header = ["direction", "problem", "T", "contender", "ms", "±", rate_unit, "of matmul"]
    header += ["of best", "workspace MiB", "measured MiB", "error"]

    def mib(size: int | None) -> str:
        return "" if size is None else mebibytes(size)

    def of_best(row: Row, name: str) -> str:
        times = {n: of["median_s"] for n, of in row["times"].items() if n not in row["wrong"]}
        return f"{min(times.values()) / times[name]:.2f}" if name in times else ""

    def cells(row: Row, name: str) -> list[str]:
        times, rate, memory = row["times"][name], row["tflops"][name], row["memory"].get(name, {})
        low, high = times["quartiles_s"]
        most, errors = row["matmul_tflops"], row["errors"].get(name)
        return [
            row["direction"],
            label(row, names),
            str(row["length"]),
            f"{name} in pure JAX" if name == OURS and why_pure_jax(row) else name,
            f"{times['median_s'] * 1e3:.3g}",
            f"{(high - low) / 2 * 1e3:.1g}",
            f"{rate * factor:.3g}",
            f"{rate / most:.0%}" if most else "",
            of_best(row, name),
            mib(memory.get("workspace_bytes")),
            "not measured" if "not_measured" in memory else mib(memory.get("measured_bytes")),
            marked(row, name, f"{max(errors.values()):.1e}") if errors else "",
        ]

    lines = [cells(row, name) for row in rows for name in contenders(rows) if name in row["times"]]
    return table(header, lines, left=4)
