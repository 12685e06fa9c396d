"""Makes the README's table and picture of speed from a benchmark's results.

    python benchmarks/plot.py [benchmarks/results/cpu-<model>-<date>.json]

Without a file: the newest results.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = RESULTS / "cpu.png"
BEGIN, END = "<!-- benchmark: cpu -->\n", "<!-- end of benchmark -->"


def newest_results() -> Path:
    """Returns the newest results file: the names end with their date."""
    return max(RESULTS.glob("cpu-*.json"), key=lambda path: path.stem[-10:])


def read(path: Path) -> dict[str, Any]:
    """Returns a benchmark's results."""
    return json.loads(path.read_text())


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


def with_table(readme: str, results: dict[str, Any]) -> str:
    """Returns the README's text with the table between its markers replaced."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table(results)}\n{END}{after}"


def draw(results: dict[str, Any], path: Path) -> None:
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


def main(arguments: list[str]) -> None:
    path = Path(arguments[0]) if arguments else newest_results()
    results = read(path)
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), results))
    draw(results, PICTURE)
    print(f"{path} -> {readme}, {PICTURE}")


if __name__ == "__main__":
    main(sys.argv[1:])
