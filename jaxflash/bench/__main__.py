"""Times attention on this machine, and checks results and weighs memory in the same run.

    python -P -m jaxflash.bench                 # a minute on a laptop; on a GPU fa3
    python -P -m jaxflash.bench --preset fa3 long --budget 500   # what is left after 500 s is said
    python -P -m jaxflash.bench --batch 4 --heads 16 --kv-heads 4 --head-dim 128 --lengths 1024 4096
    python -P -m jaxflash.bench --merge a.json b.json --out all.json

Contenders are jaxflash and every alternative that is installed. They run jitted and take turns in
one process, on random normal numbers. A measurement is as many calls as last 30 ms, dispatched
back to back, and one wait; of seven (fewer where calls are long) the median is reported. Backward
is the call of the vjp alone, its residuals computed before. Output and gradients of one head are
compared with the formula in float32 (in float64 where they are float32). A contender that fails is
reported with its error, and stops nobody. Writes JSON and, with matplotlib, pictures beside it:
`pip install 'jaxflash[bench]'` for these and a progress bar.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax

from jaxflash._validation import MAX_HEAD_DIM
from jaxflash.bench import report
from jaxflash.bench.contenders import CONTENDERS, OURS
from jaxflash.bench.measure import (
    REFERENCE,
    absent_rows,
    bytes_per_second,
    contenders_of,
    measure_group,
)
from jaxflash.bench.memory import measured_elsewhere, peak_or_reason
from jaxflash.bench.presets import DEFAULT_PRESET, PRESETS, Group
from jaxflash.bench.problems import DIRECTIONS, FEATURES, Problem, problem_of
from jaxflash.bench.programs import lower_expected, trace
from jaxflash.bench.results import (
    FAILURES,
    INTERRUPTED,
    Results,
    Row,
    facts,
    merged,
    read,
    reason,
    write,
)

DTYPES = ("float32", "float16", "bfloat16")
DEFAULT_SHAPE = {"batch": 1, "heads": 8, "head_dim": 64}
DEFAULT_OUT = Path("jaxflash-bench.json")
INTERRUPTED_STATUS = 130  # as of a process that SIGINT ended


def an_int(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns what reads an int of the command line that lies between two."""
    expected = f"{least} or more" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected an int, {expected}, got {text!r}")
        return value

    return parse


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m jaxflash.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset",
        nargs="+",
        choices=PRESETS,
        metavar="NAME",
        help=f"groups of known shapes: {', '.join(PRESETS)}",
    )
    parser.add_argument("--lengths", type=an_int(1), nargs="+", metavar="T")
    shape = parser.add_argument_group("shapes of your own, instead of a preset")
    shape.add_argument("--batch", type=an_int(1), metavar="B", help="default: 1")
    shape.add_argument("--heads", type=an_int(1), metavar="N", help="default: 8")
    shape.add_argument("--kv-heads", type=an_int(1), metavar="K", help="default: N")
    head_dims = an_int(1, MAX_HEAD_DIM)
    shape.add_argument("--head-dim", type=head_dims, metavar="H", help="default: 64")
    shape.add_argument("--dtype", choices=DTYPES, help="default: bfloat16; on a CPU float32")
    shape.add_argument(
        "--window", type=an_int(0), metavar="W", help="keys that a query sees to each side"
    )
    shape.add_argument(
        "--feature", choices=FEATURES, metavar="NAME", help=f"one of: {'; '.join(FEATURES)}"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        metavar="NAME",
        help=f"default: those that are installed of {', '.join(CONTENDERS)}",
    )
    parser.add_argument("--budget", type=float, default=3600, help="seconds")
    parser.add_argument(
        "--peak-memory",
        action="store_true",
        help="measures what output, gradients and workspace take, in a process for each contender",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"JSON file; keeps what other groups it has; default: {DEFAULT_OUT}",
    )
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--commit", help="of jaxflash, where git doesn't know")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="JSON", help="into --out; measures nothing"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="lowers everything for CUDA, measures nothing"
    )
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the settings of the command line, and as `known` the results that there are before.

    What can't be ends the process as other wrong usage does, with 2: 1 says that results are wrong.
    """
    parser = make_parser()
    settings = parser.parse_args(arguments)
    try:
        _check(settings)
        settings.out = settings.out or DEFAULT_OUT
        settings.known = _known(settings)
    except ValueError as error:
        parser.error(str(error))
    return settings


def _check(settings: argparse.Namespace) -> None:
    """Raises `ValueError` for arguments that contradict one another."""
    shape = _own_shape(settings)
    if settings.preset and shape:
        raise ValueError(f"--preset has shapes of its own, without {', '.join(shape)}")
    heads = shape.get("heads", DEFAULT_SHAPE["heads"])
    if heads % shape.get("kv_heads", heads):
        raise ValueError(f"--kv-heads: expected a divisor of {heads}, got {shape['kv_heads']}")
    if settings.merge and settings.out is None:
        raise ValueError("--merge: expected --out, the file for what is merged, got none")


def _known(settings: argparse.Namespace) -> Results:
    """What is merged, or what the file for the results has already; raises `ValueError`."""
    nothing: Results = {"groups": {}}
    if settings.peak_of or settings.dry_run:
        return nothing
    known = _read("--out", settings.out) if settings.out.exists() else nothing
    if not settings.merge:
        return known
    files = [_read("--merge", path) for path in settings.merge]
    try:
        return merged(files)
    except ValueError as error:
        raise ValueError(f"--merge: {error}") from error


def _read(option: str, path: Path) -> Results:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: expected a file of results, got {path}: {error}") from error


def _own_shape(settings: argparse.Namespace) -> dict[str, Any]:
    """What was given of a problem's attributes, by name."""
    names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "window", "feature")
    given = vars(settings)
    return {name: given[name] for name in names if given[name] is not None}


def custom(settings: argparse.Namespace, platform: str) -> dict[str, Group]:
    """Returns the problems of the shape that was given, by a name made of it.

    So a file keeps the results of other shapes.
    """
    dtype = "float32" if platform == "cpu" else "bfloat16"
    shape: dict[str, Any] = {**DEFAULT_SHAPE, "dtype": dtype, **_own_shape(settings)}
    problems = [
        Problem(length=length, is_causal=is_causal, **shape)
        for length in settings.lengths or PRESETS["laptop"].lengths
        for is_causal in (False, True)
    ]
    title = ", ".join(report.WORDS[name](value) for name, value in shape.items())
    name = re.sub("[^a-z0-9]+", "-", title.lower().replace("=", "")).strip("-")
    return {name: Group(title, problems)}


def chosen(settings: argparse.Namespace, platform: str) -> dict[str, Group]:
    """Returns the groups that were asked for, by name."""
    if _own_shape(settings):
        groups = custom(settings, platform)
    else:
        names = settings.preset or [DEFAULT_PRESET.get(platform, "laptop")]
        groups = {name: PRESETS[name].group(settings.lengths) for name in names}
    if settings.contenders:
        groups = {k: replace(g, contenders=settings.contenders) for k, g in groups.items()}
    return groups


class Progress:
    """A bar of the problems that are done; without tqdm a line for each group."""

    def __init__(self, total: int):
        """Starts with none of `total` problems done."""
        try:
            self._bar = importlib.import_module("tqdm").tqdm(total=total, unit="problem")
        except ModuleNotFoundError:
            self._bar = None

    def describe(self, text: str) -> None:
        """Says what is done now."""
        if self._bar is None:
            print(text, file=sys.stderr)
        else:
            self._bar.set_description(text)

    def advance(self) -> None:
        """Counts a problem."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def add_peaks(rows: Iterable[Row], peaks: dict[tuple[Problem, str], Any]) -> None:
    """Adds the memory that processes of their own measured, to the rows of output and gradients."""
    for row in rows:
        for (problem, name), peak in peaks.items():
            if row["direction"] == "backward" and problem == problem_of(row):
                row["memory"][name] = {**row["memory"].get(name, {}), **peak}


def run(
    groups: dict[str, Group],
    settings: argparse.Namespace,
    results: Results,
    save: Callable[[], None],
) -> None:
    """Measures groups into `results`, and saves what there is after each problem.

    Raises:
      KeyboardInterrupt: as it came. The rest of the group is reported as interrupted, and saved.
    """
    deadline = time.time() + settings.budget
    progress = Progress(sum(len(group.problems) for group in groups.values()))
    peaks: dict[tuple[Problem, str], Any] = {}
    # Processes of their own come first: this one may hold most of a GPU's memory afterwards.
    for group in groups.values() if settings.peak_memory else ():
        progress.describe("peak memory")
        peaks |= {
            (problem, name): measured_elsewhere(name, problem)
            for problem in group.problems
            for name in contenders_of(group)
            if time.time() < deadline
        }
    known = {**facts(settings.commit), "bytes_per_second": bytes_per_second()}
    for name, group in groups.items():
        progress.describe(name)
        rows: list[Row] = []
        results["groups"][name] = {"title": group.title, **known, "rows": rows}
        try:
            for of_problem in measure_group(group, deadline):
                add_peaks(of_problem, peaks)
                rows += of_problem
                save()
                progress.advance()
        except KeyboardInterrupt:
            progress.close()
            for problem in group.problems[len(rows) // len(DIRECTIONS) :]:
                rows += absent_rows(problem, contenders_of(group), INTERRUPTED)
            save()
            raise
    progress.close()


def measured(settings: argparse.Namespace) -> Results:
    """Measures what was asked for, writes it and prints it; an interrupt ends the process."""
    groups, known = chosen(settings, jax.default_backend()), settings.known["groups"]
    results: Results = {"groups": {}}

    def save() -> None:
        write({"groups": {**known, **results["groups"]}}, settings.out)

    try:
        run(groups, settings, results, save)
    except KeyboardInterrupt:
        print(report.summary(results))
        where = f"is in {settings.out}" if results["groups"] else "is nothing"
        print(f"interrupted: what was measured before {where}", file=sys.stderr)
        sys.exit(INTERRUPTED_STATUS)
    for group in results["groups"].values():
        print(report.details(group["rows"]), end="\n\n")
    return results


def dry_run(groups: dict[str, Group]) -> None:
    """Lowers every program for CUDA and prints what can't be."""
    for name, group in groups.items():
        lowered, absent = 0, dict[tuple[str, str, str], int]()
        for problem in group.problems:
            for direction, contender in product(DIRECTIONS, group.contenders or CONTENDERS):
                try:
                    trace(contender, problem, direction, "gpu").map(_lower_for_cuda)
                    lowered += 1
                except FAILURES as error:
                    missing = direction, contender, reason(error)
                    absent[missing] = absent.get(missing, 0) + 1
            try:
                lower_expected(problem)
            except Exception as error:
                missing = "checking", REFERENCE, reason(error)
                absent[missing] = absent.get(missing, 0) + 1
        print(f"{name}: {len(group.problems)} problems, {lowered} programs lowered")
        for (direction, contender, why), count in absent.items():
            print(f"  absent from {direction} of {count} problems: {contender}: {why}")


def _lower_for_cuda(traced: Any) -> Any:
    return traced.lower(lowering_platforms=("cuda",))


def draw(results: Results, out: Path) -> list[Path]:
    """Draws the groups where matplotlib is installed; returns the files."""
    try:
        plots = importlib.import_module("jaxflash.bench.plots")
        return [
            path
            for name, group in results["groups"].items()
            for path in plots.draw(group, out.with_name(f"{out.stem}-{name}"))
        ]
    except ModuleNotFoundError as error:
        print(f"no pictures: {error} (pip install 'jaxflash[bench]')", file=sys.stderr)
        return []


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    settings = parse_arguments(arguments)
    if settings.peak_of:
        name, attributes = settings.peak_of
        print(json.dumps(peak_or_reason(name, Problem(**json.loads(attributes)))))
        return
    if settings.merge:
        results = settings.known
        write(results, settings.out)
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if settings.dry_run:
            dry_run(chosen(settings, "gpu"))
            return
        results = measured(settings)
    print(report.summary(results))
    paths = [settings.out, *([] if settings.no_plots else draw(results, settings.out))]
    print("\n" + "\n".join(map(str, paths)))
    wrong = [
        row for group in results["groups"].values() for row in group["rows"] if OURS in row["wrong"]
    ]
    if wrong:
        sys.exit(f"jaxflash has wrong results in {len(wrong)} rows")


if __name__ == "__main__":
    main()
