"""Results as JSON: their rows, where they were measured, and files of them.

A file holds groups by name. A group has a title, facts of the machine, and rows: a problem in one
direction, with what is known of each contender (`times`, `errors`, `memory`, or why it is
`absent`) and what follows from that (`tflops`, `ratio`, `wrong`). Where jaxflash computed without
its kernels, its times say why, as `pure_jax`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxflash import __version__, _modules
from jaxflash.bench.contenders import CONTENDERS, OURS
from jaxflash.bench.problems import PROBLEM_FIELDS, problem_of

ALLOWED_ERROR = {"float32": 5e-6, "float16": 5e-3, "bfloat16": 2e-2}
"""Relative, in the Frobenius norm, of output and gradients."""

BUDGET_SPENT = "the budget of time was spent"
INTERRUPTED = "the run was interrupted"

FAILURES = (Exception, SystemExit)
"""What a contender fails by: also by ending the process, but not by the user's Ctrl-C."""

Row = dict[str, Any]
Results = dict[str, Any]


def reason(error: BaseException) -> str:
    """Returns the first line of an error, for the results."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 300 else text[:297] + "..."


def version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def rated(row: Row) -> Row:
    """Returns a row with rates, ratios to jaxflash's time, and who was wrong, if any."""
    flops = problem_of(row).flops(row["direction"])
    medians = {name: times["median_s"] for name, times in row["times"].items()}
    ours = medians.get(OURS)
    allowed = ALLOWED_ERROR[row["dtype"]]
    return {
        **row,
        "tflops": {name: flops / median / 1e12 for name, median in medians.items()},
        "ratio": {name: median / ours for name, median in medians.items() if ours and name != OURS},
        "wrong": [
            name
            for name, errors in row["errors"].items()
            if not all(error <= allowed for error in errors.values())
        ],
    }


def best_rival(row: Row) -> str | None:
    """Returns the fastest contender beside jaxflash that was right, None where there is none."""
    right = {name: ratio for name, ratio in row["ratio"].items() if name not in row["wrong"]}
    return min(right, key=right.__getitem__, default=None)


def why_pure_jax(row: Row) -> str | None:
    """Returns why what was timed as jaxflash is not its kernels; None where it is."""
    return row["times"].get(OURS, {}).get("pure_jax")


def commit() -> str | None:
    """Returns the commit of the source tree, marked where it has changes; None elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return run.stdout.strip() or None


def facts(commit_name: str | None = None) -> dict[str, Any]:
    """Returns where and of what results are; facts that there are not are None.

    Args:
      commit_name: where git doesn't know.
    """
    backend = jax.default_backend()
    here = _gpu() if backend == "gpu" else _processor()
    rivals = {contender.distribution for contender in CONTENDERS.values()} - {None}
    return {
        **here,
        "platform": backend,
        "cuda": ".".join(map(str, _modules.MODULES["cuda"].facts.get("cuda_version", ()))) or None,
        "cudnn": version("nvidia-cudnn-cu13"),
        "commit": commit_name or commit(),
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "jaxflash": __version__,
        **{name: version(name) for name in sorted(map(str, rivals)) if version(name)},
    }


def _gpu() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True).stdout
        device, driver = answer.splitlines()[0].split(", ")
    except (OSError, IndexError):
        device, driver = jax.devices()[0].device_kind, None
    return {"device": device, "driver": driver}


def _processor() -> dict[str, Any]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    names = re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE)
    sets = _modules.MODULES["cpu"].facts.get("instruction_set")
    return {
        "device": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": sets,
    }


def write(results: Results, path: Path) -> None:
    """Writes a file of results: all of it or, where that is interrupted, nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def read(path: Path) -> Results:
    """Returns the results of a file.

    Raises:
      ValueError: the file holds something else.
    """
    found = json.loads(path.read_text())
    groups = found.get("groups") if isinstance(found, dict) else None
    if not isinstance(groups, dict):
        raise ValueError("it has no groups of results")
    if without := [name for name, group in groups.items() if "rows" not in group]:
        raise ValueError(f"it has no rows in {', '.join(without)}")
    return found


def merged(files: Iterable[Results]) -> Results:
    """Returns the groups of several files, row by row.

    Of a contender that is in two rows of a problem the later counts, unless it is absent there.

    Raises:
      ValueError: a group was measured on different devices, whose times can't be compared.
    """
    groups: dict[str, Any] = {}
    for results in files:
        for name, group in results["groups"].items():
            known = groups.get(name, {"rows": []})
            _check_same_device(name, known, group)
            groups[name] = {**known, **group, "rows": _merged_rows(known["rows"] + group["rows"])}
    return {"groups": groups}


def _check_same_device(name: str, known: dict[str, Any], group: dict[str, Any]) -> None:
    for fact in ("platform", "device"):
        expected, found = known.get(fact), group.get(fact)
        if None not in (expected, found) and expected != found:
            raise ValueError(f"group {name}: expected one {fact}, got {expected} and {found}")


def _merged_rows(rows: Iterable[Row]) -> list[Row]:
    together: dict[Any, Row] = {}
    for row in rows:
        row_key = (row["direction"], *(row[name] for name in PROBLEM_FIELDS))
        known = together.setdefault(row_key, row)
        for part in ("times", "errors", "memory", "absent"):
            known = {**known, part: {**known[part], **row[part]}}
        for name in known["times"]:
            known["absent"].pop(name, None)
        matmul_tflops = row["matmul_tflops"] or known["matmul_tflops"]
        together[row_key] = {**known, "matmul_tflops": matmul_tflops}
    return [rated(row) for row in together.values()]
