"""Times jaxflash and its rivals on an NVIDIA GPU, and checks their results in the same run.

    python benchmarks/gpu.py --out gpu.json                   # every group, about 15 minutes
    python benchmarks/gpu.py --only grid triton --budget 480  # seconds; what is left is reported
    python benchmarks/gpu.py --quick                          # lengths 1024 and 8192 of the grids
    python benchmarks/gpu.py --dry-run                        # lowers everything; needs no GPU
    python benchmarks/gpu.py --merge a.json b.json --out benchmarks/results/gpu-h200-DATE.json

Contenders run jitted and take turns in one process, on random normal numbers. A measurement is as
many calls as last 20 ms, dispatched back to back, and one wait; of seven the median is reported.
Backward is the call of the vjp alone, its residuals computed before. Every contender's output and
gradients are compared, on one head, with dense attention in float32 (float64 where they are
float32). torch and the measurement of memory have processes of their own.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import numpy as np

import contenders
from contenders import CONTENDERS, TORCH
from harness import RESULTS, commit, read, reason, take_turns, today, version, write
from jaxflash import _modules
from plot import gpu_tables
from problems import (
    FEATURES,
    Operands,
    Problem,
    backward,
    expected,
    forward,
    linearize,
    make_operands,
    normals,
)

TOKENS, HIDDEN = 16384, 2048
LENGTHS = (1024, 8192, 512, 2048, 4096, 16384)
QUICK_LENGTHS = (1024, 8192)
MOST_SCORES = 4096  # the longest sequence whose scores are held in memory
CHUNK = 8  # problems compiled together
ALLOWED_ERROR = {"float32": 5e-6, "float16": 5e-3, "bfloat16": 2e-2}
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Group:
    """Problems and who computes them.

    Attributes:
      title: what they have in common.
      problems: the most important first, for when the time is short.
      rivals: of jaxflash, names in `CONTENDERS`, and `TORCH`.
    """

    title: str
    problems: Sequence[Problem]
    rivals: Sequence[str]


def training(length: int, head_dim: int, **settings: Any) -> Problem:
    """A problem of the size that FlashAttention's papers have."""
    return Problem(TOKENS // length, length, HIDDEN // head_dim, head_dim, **settings)


def grid(lengths: Iterable[int]) -> Group:
    problems = [
        training(length, head_dim, is_causal=is_causal)
        for length in lengths
        for head_dim in (64, 128, 256)
        for is_causal in (False, True)
    ]
    return Group("16384 tokens, hidden size 2048, bfloat16", problems, ["flash-attn-jax"])


def triton(lengths: Iterable[int]) -> Group:
    problems = [
        Problem(4, length, 48, head_dim, "float16", is_causal)
        for length in lengths
        if length >= 1024
        for head_dim in (64, 128, 16)
        for is_causal in (False, True)
    ]
    return Group("the Triton tutorial's B=4, N=48, float16", problems, [TORCH, "jax Triton mha"])


def float32(_: Iterable[int]) -> Group:
    problems = [
        Problem(4, 4096, HIDDEN // head_dim, head_dim, "float32", is_causal)
        for head_dim in (64, 128)
        for is_causal in (False, True)
    ]
    return Group("float32, B=4, hidden size 2048", problems, ["jax.nn xla"])


def features(_: Iterable[int]) -> Group:
    problems = [
        training(4096, head_dim, feature=feature) for head_dim in (64, 128) for feature in FEATURES
    ]
    problems += [
        training(16384, head_dim, feature=feature)
        for head_dim in (64, 128)
        for feature in ("plain", "8 documents")
    ]
    title = "16384 tokens, hidden size 2048, bfloat16"
    return Group(title, problems, ["jax.nn cudnn", "jax.nn xla", "dense xla"])


def small(_: Iterable[int]) -> Group:
    problems = [
        Problem(batch, length, 8, head_dim, is_causal=is_causal, repeats=16)
        for length in (256, 512, 1024)
        for batch in (1, 4)
        for head_dim in (64, 128)
        for is_causal in (False, True)
    ]
    title = "few heads, bfloat16, N=8, 16 calls in a program"
    return Group(title, problems, ["flash-attn-jax"])


GROUPS: dict[str, Callable[[Iterable[int]], Group]] = {
    "grid": grid,
    "triton": triton,
    "float32": float32,
    "features": features,
    "small": small,
}

MEMORY = "memory"
MEMORY_PROBLEM = Problem(1, 65536, 16, 128)
MEMORY_CONTENDERS = ("jaxflash", "jax.nn cudnn", "jax.nn xla")


def is_worth_it(name: str, problem: Problem) -> bool:
    """Whether a contender runs: those that hold all the scores, only where there is a point."""
    unsupported = bool(problem.soft_cap or problem.dropout_rate)
    if name == "dense xla":
        return unsupported
    if name == "jax.nn xla" and problem.dtype != "float32":
        return problem.feature != "plain" and not unsupported and problem.length <= MOST_SCORES
    return True


# Programs


def compile_expected(lowered: Any) -> Any:
    """Compiles what is run once: searching for the fastest products would take longest."""
    on_gpu = jax.default_backend() == "gpu"
    return lowered.compile({"xla_gpu_autotune_level": "0"} if on_gpu else None)


@dataclass(frozen=True)
class Programs:
    """The programs of a contender: traced, lowered or compiled."""

    forward: Any
    linearize: Any
    backward: Any

    def map(self, function: Callable[[Any], Any]) -> "Programs":
        return Programs(*(function(getattr(self, name)) for name in self.__dataclass_fields__))


def trace(contender: str, problem: Problem) -> Programs:
    attention = CONTENDERS[contender](problem)
    specs = problem.differentiable(), problem.constants()
    precision = "highest" if problem.dtype == "float32" else None
    with jax.default_matmul_precision(precision):
        linearized = jax.jit(linearize(attention)).trace(*specs)
        _, pull = linearized.out_info
        return Programs(
            jax.jit(forward(attention, problem)).trace(*specs),
            linearized,
            jax.jit(backward(problem)).trace(pull, problem.sequence),
        )


def lower_expected(problem: Problem) -> Any:
    """Lowers what results are compared with."""
    part = problem.checked_part()
    specs = problem.differentiable(), problem.constants(), {"output": problem.sequence}
    operands, constants, cotangent = (
        {name: jax.eval_shape(lambda x, name=name: part(name, x), x) for name, x in spec.items()}
        for spec in specs
    )
    with jax.default_matmul_precision("highest"), jax.enable_x64(problem.dtype == "float32"):
        return jax.jit(expected(problem)).trace(operands, constants, cotangent["output"]).lower()


@dataclass(frozen=True)
class Prepared:
    """A problem's compiled programs.

    Attributes:
      programs: by contender.
      expected: what they are compared with.
      absent: why others have none.
    """

    problem: Problem
    programs: dict[str, Programs]
    expected: Any
    absent: dict[str, str]


def prepare(
    problem: Problem, names: Iterable[str], pool: ThreadPoolExecutor
) -> Callable[[], Prepared]:
    """Traces and lowers a problem's programs, and has the pool compile them.

    Returns:
      A function that waits for them and returns them, `Prepared`.
    """
    compiling, absent = {}, {}
    for name in filter(lambda name: is_worth_it(name, problem), names):
        try:
            lowered = trace(name, problem).map(lambda traced: traced.lower())
            compiling[name] = lowered.map(lambda lowered: pool.submit(lowered.compile))
        except Exception as error:
            absent[name] = reason(error)
    compiling_expected = pool.submit(compile_expected, lower_expected(problem))

    def wait() -> Prepared:
        programs = {}
        for name, futures in compiling.items():
            try:
                programs[name] = futures.map(lambda future: future.result())
            except Exception as error:
                absent[name] = reason(error)
        return Prepared(problem, programs, compiling_expected.result(), absent)

    return wait


# Measurement


def relative_errors(found: Operands, correct: Operands) -> dict[str, float]:
    """Returns the relative error of each result in the Frobenius norm."""
    errors = {}
    for name, array in correct.items():
        difference = np.asarray(found[name], np.float64) - np.asarray(array, np.float64)
        errors[name] = float(np.linalg.norm(difference) / np.linalg.norm(array))
    return errors


def part_of(problem: Problem, arrays: Operands) -> Operands:
    part = problem.checked_part()
    return {name: part(name, array) for name, array in arrays.items()}


def measure(prepared: Prepared) -> list[dict[str, Any]]:
    """Checks and times a problem's contenders; returns a row for each direction."""
    problem, absent = prepared.problem, dict(prepared.absent)
    operands, constants, cotangent = make_operands(problem)
    output, gradients = prepared.expected(
        part_of(problem, operands),
        part_of(problem, constants),
        problem.checked_part()("output", cotangent),
    )
    correct = jax.device_get({"output": output, **gradients})
    del output, gradients
    calls, errors = {}, {}
    for name, programs in prepared.programs.items():
        try:
            _, pull = programs.linearize(operands, constants)
            found = {
                "output": programs.forward(operands, constants),
                **programs.backward(pull, cotangent),
            }
            # "dense xla" drops other probabilities than jaxflash: right, but not comparable.
            if not (problem.dropout_rate and name == "dense xla"):
                errors[name] = relative_errors(part_of(problem, found), correct)
            del found
        except Exception as error:
            absent[name] = reason(error)
            continue
        calls[name] = {
            "forward": lambda programs=programs: programs.forward(operands, constants),
            "backward": lambda programs=programs, pull=pull: programs.backward(pull, cotangent),
        }
    return [
        {
            "direction": direction,
            **asdict(problem),
            "times": per_repeat(problem, direction, calls),
            "errors": errors,
            "absent": absent,
        }
        for direction in DIRECTIONS
    ]


def per_repeat(problem: Problem, direction: str, calls: dict[str, Any]) -> dict[str, Any]:
    """Times the contenders in one direction, each repeat of a program by itself."""

    def share(times: dict[str, Any]) -> dict[str, Any]:
        low, high = times["quartiles_s"]
        repeats = problem.repeats
        return {
            **times,
            "median_s": times["median_s"] / repeats,
            "quartiles_s": [low / repeats, high / repeats],
        }

    candidates = {name: call[direction] for name, call in calls.items()}
    timed = take_turns(candidates, jax.block_until_ready)
    return {name: share(times) for name, times in timed.items()}


def rated(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with rates, ratios to jaxflash's time, and who was wrong, if any."""
    fields = {name: row[name] for name in Problem.__dataclass_fields__}
    flops = Problem(**fields).flops(row["direction"])
    medians = {name: times["median_s"] for name, times in row["times"].items()}
    ours = medians.get("jaxflash")
    return {
        **row,
        "tflops": {name: flops / median / 1e12 for name, median in medians.items()},
        "ratio": {
            name: median / ours for name, median in medians.items() if ours and name != "jaxflash"
        },
        "wrong": [
            name
            for name, errors in row["errors"].items()
            if not all(error <= ALLOWED_ERROR[row["dtype"]] for error in errors.values())
        ],
    }


def absent_rows(problem: Problem, names: Iterable[str], why: str) -> list[dict[str, Any]]:
    row = {**asdict(problem), "times": {}, "errors": {}, "absent": dict.fromkeys(names, why)}
    return [{"direction": direction, **row} for direction in DIRECTIONS]


def measure_group(group: Group, deadline: float) -> list[dict[str, Any]]:
    """Returns the rows of a group, torch's apart."""
    names = ["jaxflash", *(name for name in group.rivals if name != TORCH)]
    rows = []
    for start in range(0, len(group.problems), CHUNK):
        chunk = group.problems[start : start + CHUNK]
        waits = []
        if time.time() < deadline:
            # Nothing is compiled any more when the first is measured.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                waits = [prepare(problem, names, pool) for problem in chunk]
        for problem, wait in zip_longest(chunk, waits):
            rows += measure_or_say_why(problem, names, wait, deadline)
            print(".", end="", flush=True)
    print()
    return rows


def measure_or_say_why(
    problem: Problem, names: Iterable[str], wait: Callable[[], Prepared] | None, deadline: float
) -> list[dict[str, Any]]:
    if wait is None or time.time() > deadline:
        return absent_rows(problem, names, "the budget of time was spent")
    try:
        return measure(wait())
    except Exception as error:
        return absent_rows(problem, names, reason(error))


def measure_torch(problems: Sequence[Problem], deadline: float) -> dict[str, Any]:
    """Has a process of its own measure torch."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "problems.json"), Path(folder, "times.json")
        request = {"problems": [asdict(problem) for problem in problems], "deadline": deadline}
        write(request, source)
        script = Path(__file__).with_name("gpu_torch.py")
        run = subprocess.run([sys.executable, script, source, target])
        if run.returncode:
            absent = {"absent": f"the process ended with {run.returncode}"}
            return {"torch": version("torch"), "measured": [absent] * len(problems)}
        return read(target)


def add_torch(rows: list[dict[str, Any]], measured: list[dict[str, Any]]) -> None:
    """Adds what torch's process measured to the rows of the same problems, two for each."""
    for row, of_torch in zip(rows, np.repeat(np.array(measured, object), 2), strict=True):
        if "times" in of_torch:
            row["times"][TORCH] = of_torch["times"][row["direction"]]
            row["errors"] = {**row["errors"], TORCH: {"largest": of_torch["error"]}}
        else:
            row["absent"] = {**row["absent"], TORCH: of_torch["absent"]}


# Memory


def memory_programs(contender: str, problem: Problem) -> Any:
    """Lowers output and gradients, as one program."""
    attention = CONTENDERS[contender](problem)

    def function(operands: Operands, cotangent: jax.Array) -> tuple[jax.Array, Operands]:
        output, pull = linearize(attention)(operands, {})
        return output, backward(problem)(pull, cotangent)

    return jax.jit(function).trace(problem.differentiable(), problem.sequence)


def measure_memory(contender: str, problem: Problem) -> dict[str, Any]:
    """Returns the memory of forward and backward in this process, which did nothing before."""
    row: dict[str, Any] = {"contender": contender, **asdict(problem)}
    try:
        compiled = memory_programs(contender, problem).lower().compile()
        analysis = compiled.memory_analysis()
        row["arrays_bytes"] = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
        row["compiled_temp_bytes"] = analysis.temp_size_in_bytes
        specs = problem.differentiable()
        operands = {name: normals(seed, spec) for seed, (name, spec) in enumerate(specs.items())}
        cotangent = jax.block_until_ready(normals(6, problem.sequence))
        row["peak_before_bytes"] = peak_bytes()
        jax.block_until_ready(compiled(operands, cotangent))
        row["peak_bytes"] = peak_bytes()
    except Exception as error:
        row["absent"] = reason(error)
    return row


def peak_bytes() -> int | None:
    """The most that the device's allocator had handed out; None where it doesn't count."""
    statistics = jax.devices()[0].memory_stats()
    return statistics and statistics["peak_bytes_in_use"]


def memory_rows(shrink: int) -> list[dict[str, Any]]:
    """Has a process for each contender measure its memory."""
    rows = []
    for name in MEMORY_CONTENDERS:
        command = [sys.executable, __file__, "--shrink", str(shrink), "--memory-of", name]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            absent = f"the process ended with {run.returncode}: {run.stderr[-200:]}"
            rows.append({"contender": name, "absent": absent})
        else:
            rows.append(json.loads(run.stdout.splitlines()[-1]))
    return rows


# Command line


def facts(commit_name: str) -> dict[str, Any]:
    """What was measured, and where."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True).stdout
        gpu, driver = answer.splitlines()[0].split(", ")
    except (OSError, IndexError):
        gpu, driver = "none", "none"
    module = _modules.MODULES["cuda"]
    return {
        "gpu": gpu,
        "driver": driver,
        "cuda": ".".join(map(str, (module.facts or {}).get("cuda_version", ["none"]))),
        "commit": commit_name,
        "date": today(),
        **{name: version(name) for name in ("jax", "jaxflash", "flash-attn-jax", "torch")},
        "cudnn": version("nvidia-cudnn-cu13"),
    }


def shrunk(group: Group, divisor: int) -> Group:
    """Returns the group with shorter sequences, for trying things out."""
    problems = [replace(p, length=max(16, p.length // divisor)) for p in group.problems]
    return replace(group, problems=problems)


def dry_run(groups: dict[str, Group]) -> None:
    """Lowers every program for CUDA and prints what can't be."""
    CONTENDERS["jaxflash"] = contenders.jaxflash_anything
    for name, group in groups.items():
        rivals = [rival for rival in group.rivals if rival != TORCH]
        lowered, absent = 0, {}
        for problem in group.problems:
            for contender in ("jaxflash", *rivals):
                if not is_worth_it(contender, problem):
                    continue
                try:
                    trace(contender, problem).map(lower_for_cuda)
                    lowered += 1
                except Exception as error:
                    absent.setdefault((contender, reason(error)), []).append(problem)
            lower_expected(problem)
        print(f"{name}: {len(group.problems)} problems, {lowered} contenders' programs lowered")
        for (contender, why), problems in absent.items():
            print(f"  absent from {len(problems)} problems: {contender}: {why}")


def lower_for_cuda(traced: Any) -> Any:
    return traced.lower(lowering_platforms=("cuda",))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*GROUPS, MEMORY], default=[*GROUPS, MEMORY])
    parser.add_argument("--quick", action="store_true", help="two lengths of the grids alone")
    parser.add_argument("--budget", type=float, default=3600, help="seconds")
    parser.add_argument("--commit", help="where git doesn't know")
    parser.add_argument("--out", type=Path, help="JSON file; keeps the groups it has besides")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="measures nothing")
    parser.add_argument("--dry-run", action="store_true", help="lowers for CUDA, measures nothing")
    parser.add_argument("--shrink", type=int, default=1, help="divides lengths, to try things out")
    parser.add_argument("--memory-of", choices=MEMORY_CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def default_path(gpu: str) -> Path:
    model = re.sub(r"\W+", "-", gpu.lower()).strip("-")
    return RESULTS / f"gpu-{model}-{today()}.json"


def merged(paths: Iterable[Path]) -> dict[str, Any]:
    """Returns the groups of several files; the later file's where two have one."""
    groups: dict[str, Any] = {}
    for path in paths:
        groups |= read(path)["groups"]
    return {"groups": groups}


def run(settings: argparse.Namespace, groups: dict[str, Group], path: Path) -> dict[str, Any]:
    """Measures the groups; writes the file after each."""
    deadline = time.time() + settings.budget
    results = merged([path] if path.exists() else [])
    known = facts(settings.commit or commit())

    def add(name: str, title: str, rows: list[dict[str, Any]]) -> None:
        results["groups"][name] = {"title": title, **known, "rows": rows}
        write(results, path)

    # Processes of their own come first: afterwards this one holds most of the GPU's memory.
    if MEMORY in settings.only:
        add(MEMORY, "forward and backward", memory_rows(settings.shrink))
    torch = {
        name: measure_torch(group.problems, deadline)
        for name, group in groups.items()
        if TORCH in group.rivals
    }
    for name, group in groups.items():
        rows = measure_group(group, deadline)
        if name in torch:
            add_torch(rows, torch[name]["measured"])
        add(name, group.title, [rated(row) for row in rows])
    return results


def main() -> None:
    settings = parse_arguments()
    if settings.memory_of:
        problem = replace(MEMORY_PROBLEM, length=MEMORY_PROBLEM.length // settings.shrink)
        print(json.dumps(measure_memory(settings.memory_of, problem)))
        return
    lengths = QUICK_LENGTHS if settings.quick else LENGTHS
    groups = {
        name: shrunk(GROUPS[name](lengths), settings.shrink)
        for name in settings.only
        if name != MEMORY
    }
    if settings.dry_run:
        dry_run(groups)
        return
    path = settings.out or default_path(facts("")["gpu"])
    if settings.merge:
        results = merged(settings.merge)
        write(results, path)
    else:
        results = run(settings, groups, path)
    print(gpu_tables(results))
    print(f"\n{path}")
    wrong = [
        row for group in results["groups"].values() for row in group["rows"] if row.get("wrong")
    ]
    for row in wrong:
        print(f"wrong: {row['wrong']} in {row['direction']} {row['length']=} {row['feature']}")
    if any("jaxflash" in row["wrong"] for row in wrong):
        sys.exit("jaxflash has wrong results")


if __name__ == "__main__":
    main()
