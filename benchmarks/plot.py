"""Makes the README's tables and pictures of speed from a benchmark's results.

    python benchmarks/plot.py [benchmarks/results/cpu-<model>-<date>.json]
    python benchmarks/plot.py benchmarks/results/gpu-<model>-<date>.json

Without a file: the newest results of the CPU.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, read

OURS = "jaxflash"
ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- benchmark: {} -->\n", "<!-- end of benchmark -->"


def newest_results(kind: str) -> Path:
    """Returns the newest results file of "cpu" or "gpu": the names end with their date."""
    return max(RESULTS.glob(f"{kind}-*.json"), key=lambda path: path.stem[-10:])


def table(results: dict[str, Any]) -> str:
    """Returns the rows as a Markdown table, a sentence of conditions above it."""
    shape = ", ".join(f"{letter}={size}" for letter, size in results["shape"].items())
    matmul = sorted(row["matmul_gflops"] for row in results["rows"])
    lines = [
        f"{results['cpu']}, {results['cores']} cores ({results['instruction_set']}), "
        f"jax {results['jax']}, {shape}, {results['date']}, commit {results['commit']}. "
        f"The machine's own float32 matrix product (2048x2048, jitted) in the same run: "
        f"{matmul[len(matmul) // 2]:.0f} GFLOP/s.",
        "",
        "| direction | dtype | mask | T | jaxflash, ms | jax.nn, ms | times as fast "
        "| jaxflash, GFLOP/s | share of the matrix product |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
        cells = [
            "forward + backward" if row["backward"] else "forward",
            row["dtype"],
            "causal" if row["is_causal"] else "full",
            str(row["length"]),
            *(milliseconds(row["times"][name]) for name in ("jaxflash", "jax.nn")),
            f"{row['ratio']:.1f}",
            f"{row['gflops']['jaxflash']:.0f}",
            f"{row['share_of_matmul']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(times: dict[str, Any]) -> str:
    """Returns the median with half the distance of the quartiles."""
    low, high = times["quartiles_s"]
    return f"{times['median_s'] * 1e3:.1f} ± {(high - low) / 2 * 1e3:.1f}"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def gpu_tables(results: dict[str, Any]) -> str:
    """Returns a Markdown table for each group of results, a sentence of conditions above it."""
    writers = {"features": features_table, "memory": memory_table}
    return "\n\n".join(
        f"**{name}**: {conditions(group)}\n\n{writers.get(name, lengths_table)(group['rows'])}"
        for name, group in results["groups"].items()
    )


def conditions(group: dict[str, Any]) -> str:
    versions = (f"{name} {group[name]}" for name in ("driver", "cuda", "cudnn", "jax"))
    return f"{group['title']}. {group['gpu']}, {', '.join(versions)}, {group['date']}, commit " + (
        group["commit"] + "."
    )


def lengths_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns jaxflash's TFLOP/s over length, and how many times as fast as its rivals it is."""
    lengths = sorted({row["length"] for row in rows})
    rivals = sorted({name for row in rows for name in {**row["times"], **row["absent"]}} - {OURS})
    lines = [
        f"TFLOP/s, in brackets times as fast as {', '.join(rivals)} (- absent, ! wrong result):",
        "",
        f"| direction | shape | mask | {' | '.join(map(str, lengths))} |",
        f"|---|---|---|{'--:|' * len(lengths)}",
    ]
    lines_of: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in sorted(rows, key=line_order):
        shape = f"H={row['head_dim']}" + (f", B={row['batch']}" if row["repeats"] > 1 else "")
        line = (row["direction"], shape, "causal" if row["is_causal"] else "full")
        lines_of.setdefault(line, {})[row["length"]] = rate_cell(row, rivals)
    for line, cell_of in lines_of.items():
        cells = (cell_of.get(length, "") for length in lengths)
        lines.append(f"| {' | '.join((*line, *cells))} |")
    summaries = [mean_ratio(rows, rival) for rival in rivals]
    return "\n".join([*lines, *summaries, largest_errors(rows), *absences(rows)])


def line_order(row: dict[str, Any]) -> tuple[Any, ...]:
    batch = row["batch"] if row["repeats"] > 1 else 0  # elsewhere it follows from the length
    return row["direction"] != "forward", row["head_dim"], batch, row["is_causal"]


def rate_cell(row: dict[str, Any], rivals: Sequence[str]) -> str:
    """Returns "rate (ratio, ratio)", a dash for who is absent, an ! for who is wrong."""

    def marked(name: str, text: str | None) -> str:
        return (text or "-") + ("!" if name in row["wrong"] else "")

    ratios = (
        marked(name, f"{row['ratio'][name]:.2f}" if name in row["ratio"] else None)
        for name in rivals
    )
    rate = row["tflops"].get(OURS)
    return f"{marked(OURS, rate and f'{rate:.3g}')} ({', '.join(ratios)})"


def mean_ratio(rows: Sequence[dict[str, Any]], rival: str) -> str:
    """Returns a line about a rival, of the rows of problems where both have times."""
    both = [row["times"] for row in rows if rival in row["ratio"]]
    medians = {name: [times[name]["median_s"] for times in both] for name in (OURS, rival)}
    # A problem's row of forward is followed by that of backward.
    directions = {
        "forward": {name: of_one[::2] for name, of_one in medians.items()},
        "backward": {name: of_one[1::2] for name, of_one in medians.items()},
        "both": {
            name: [sum(pair) for pair in zip(of_one[::2], of_one[1::2], strict=True)]
            for name, of_one in medians.items()
        },
    }
    parts = []
    for direction, times in directions.items():
        ratios = [rival / ours for ours, rival in zip(times[OURS], times[rival], strict=True)]
        if ratios:
            parts.append(f"{direction} {geometric_mean(ratios):.2f} (least {min(ratios):.2f})")
    return f"\nTimes as fast as {rival}, geometric mean: {', '.join(parts) or 'not measured'}."


def largest_errors(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a line of how wrong each contender was."""
    largest: dict[str, float] = {}
    for row in rows:
        for name, errors in row["errors"].items():
            largest[name] = max(largest.get(name, 0.0), *errors.values())
    return "\nLargest relative error: " + ", ".join(f"{n} {e:.1e}" for n, e in largest.items())


def absences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each reason why somebody is absent from some rows."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        for absent in row["absent"].items():
            counts[absent] = counts.get(absent, 0) + 1
    return [f"\nAbsent from {n} rows: {name}: {why}" for (name, why), n in counts.items()]


def features_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns milliseconds of every feature, over those of the plain call, beside a rival's."""
    lines = [
        "| direction | shape | feature | ms | times the plain call | rivals, ms |",
        "|---|---|---|--:|--:|---|",
    ]
    plain = {}
    for row in sorted(rows, key=lambda row: (row["direction"] != "forward", row["length"])):
        times = {name: of_one["median_s"] * 1e3 for name, of_one in row["times"].items()}
        line = (row["direction"], f"T={row['length']}, H={row['head_dim']}")
        ours = times.pop(OURS, math.nan)
        plain.setdefault(line, ours)  # the plain problem is the first of its shape
        wrong = {name: "!" for name in row["wrong"]}
        rivals = (f"{name} {ms:.2f}{wrong.get(name, '')}" for name, ms in times.items())
        cells = (
            *line,
            row["feature"],
            f"{ours:.2f}{wrong.get(OURS, '')}",
            f"{ours / plain[line]:.2f}",
            ", ".join(rivals),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, largest_errors(rows), *absences(rows)])


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns MiB of arrays, of what was measured on top, and of what the compiler planned."""

    def mib(size: int | None) -> str:
        return "" if size is None else f"{size / 2**20:.0f}"

    lines = [
        "| | inputs, output, gradients, MiB | workspace, MiB | compiler's workspace, MiB | |",
        "|---|--:|--:|--:|---|",
    ]
    for row in rows:
        arrays, peak = row.get("arrays_bytes"), row.get("peak_bytes")
        workspace = None if peak is None or arrays is None else peak - arrays
        sizes = (arrays, workspace, row.get("compiled_temp_bytes"))
        cells = (row["contender"], *map(mib, sizes), row.get("absent", ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(readme: str, kind: str, results: dict[str, Any]) -> str:
    """Returns the README's text with what is between its markers of `kind` replaced."""
    begin = BEGIN.format(kind)
    before, rest = readme.split(begin)
    _, after = rest.split(END, 1)
    text = TABLES[kind](results)
    return f"{before}{begin}{text}\n{END}{after}"


def draw_cpu(results: dict[str, Any], path: Path) -> None:
    """Draws GFLOP/s over length: a panel for each direction and mask."""
    # Imported here, so that the test of the table does not need it.
    import matplotlib.pyplot as plt

    panels = [(backward, causal) for backward in (False, True) for causal in (False, True)]
    lengths = sorted({row["length"] for row in results["rows"]})
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), sharey=True, layout="constrained")
    for ax, (backward, causal) in zip(axes, panels, strict=True):
        rows = [r for r in results["rows"] if (r["backward"], r["is_causal"]) == (backward, causal)]
        for place, (name, color) in enumerate((("jaxflash", "tab:blue"), ("jax.nn", "0.6"))):
            for shift, (dtype, hatch) in enumerate((("float32", None), ("bfloat16", "///"))):
                gflops = {r["length"]: r["gflops"][name] for r in rows if r["dtype"] == dtype}
                x = [i + (2 * place + shift - 1.5) * 0.2 for i in range(len(lengths))]
                ax.bar(
                    x,
                    [gflops.get(length, 0) for length in lengths],
                    width=0.2,
                    color=color,
                    hatch=hatch,
                    edgecolor="white",
                    label=f"{name} {dtype}",
                )
        matmul = sorted(row["matmul_gflops"] for row in rows)
        ax.axhline(matmul[len(matmul) // 2], color="black", linewidth=1, linestyle=":")
        ax.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        direction = "forward + backward" if backward else "forward"
        ax.set_title(f"{direction}, {'causal' if causal else 'full'}")
        ax.set_xlabel("sequence length")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("GFLOP/s (dotted: f32 matmul)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"Attention on {results['cores']} cores of {results['cpu']}")
    figure.savefig(path, dpi=110)


def draw_gpu(results: dict[str, Any], path: Path) -> None:
    """Draws TFLOP/s of the grid over length: a panel for each direction and head dim."""
    # Imported here, so that the test of the table does not need it.
    import matplotlib.pyplot as plt

    rows = results["groups"]["grid"]["rows"]
    head_dims = sorted({row["head_dim"] for row in rows})
    figure, axes = plt.subplots(
        2, len(head_dims), figsize=(11, 6), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for of_direction, direction in zip(axes, ("forward", "backward"), strict=True):
        for ax, head_dim in zip(of_direction, head_dims, strict=True):
            panel = [r for r in rows if (r["direction"], r["head_dim"]) == (direction, head_dim)]
            draw_rates(ax, panel)
            ax.set_title(f"{direction}, head dim {head_dim}")
    axes[0, 0].set_ylim(0)
    for ax in axes[-1]:
        ax.set_xlabel("sequence length")
    for ax in axes[:, 0]:
        ax.set_ylabel("TFLOP/s")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"Attention on {results['groups']['grid']['gpu']}")
    figure.savefig(path, dpi=110)


def draw_rates(ax: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draws a line for each contender and mask."""
    names = sorted({name for row in rows for name in row["tflops"]}, key=lambda n: n != OURS)
    for name, color in zip(names, ("tab:blue", "0.6", "tab:orange", "tab:green"), strict=False):
        for is_causal, style in ((False, "-"), (True, ":")):
            rates = {
                row["length"]: row["tflops"][name]
                for row in rows
                if row["is_causal"] == is_causal and name in row["tflops"]
            }
            lengths = sorted(rates)
            label = f"{name}, {'causal' if is_causal else 'full'}"
            ax.plot(
                lengths, [rates[n] for n in lengths], style, marker="o", color=color, label=label
            )
    ax.set_xscale("log", base=2)
    ax.spines[["top", "right"]].set_visible(False)


TABLES = {"cpu": table, "gpu": gpu_tables}
PICTURES = {"cpu": draw_cpu, "gpu": draw_gpu}


def main(arguments: list[str]) -> None:
    path = Path(arguments[0]) if arguments else newest_results("cpu")
    results, kind = read(path), path.stem.split("-")[0]
    readme, picture = ROOT / "README.md", RESULTS / f"{kind}.png"
    readme.write_text(with_table(readme.read_text(), kind, results))
    PICTURES[kind](results, picture)
    print(f"{path} -> {readme}, {picture}")


if __name__ == "__main__":
    main(sys.argv[1:])
