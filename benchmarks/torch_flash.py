"""Times torch's SDPA with its flash backend on the problems of a preset of `jaxflash.bench`.

    python benchmarks/torch_flash.py --preset triton-tutorial --out torch.json
    python -m jaxflash.bench --merge jaxflash.json torch.json --out both.json

In a process of its own, because torch and JAX would share the GPU's memory.
"""

import argparse
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxflash.bench.measure import absent_rows
from jaxflash.bench.presets import PRESETS
from jaxflash.bench.problems import DIRECTIONS, Problem
from jaxflash.bench.results import BUDGET_SPENT, Row, facts, rated, reason, version, write
from jaxflash.bench.timing import Times, take_turns

NAME = "torch flash"


def relative_errors(results: list[Any], expected: list[Any]) -> dict[str, float]:
    """Returns the relative error of each result in the Frobenius norm."""
    names = ("output", "query", "key", "value")
    pairs = zip(names, results, expected, strict=True)
    return {name: float((a.float() - b).norm() / b.norm()) for name, a, b in pairs}


class Measurement:
    """Attention by torch of one problem, on random numbers `[B, N, T, H]`."""

    def __init__(self, torch: Any, problem: Problem):
        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.is_causal = problem.is_causal
        shape = (problem.batch, problem.heads, problem.length, problem.head_dim)
        generator = torch.Generator(self.device).manual_seed(0)
        *self.operands, self.cotangent = (
            torch.randn(shape, generator=generator, device=self.device)
            .to(getattr(torch, problem.dtype))
            .requires_grad_()
            for _ in range(4)
        )
        self.cotangent = self.cotangent.detach()

    def attention(self, backend: str, *operands: Any) -> Any:
        attention = importlib.import_module("torch.nn.attention")
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            function = self.torch.nn.functional.scaled_dot_product_attention
            return function(*operands, is_causal=self.is_causal)

    def wait(self, _: Any) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def errors(self) -> dict[str, float]:
        """Returns the errors of output and gradients of one head against float32."""

        def results(backend: str, operands: list[Any], cotangent: Any) -> list[Any]:
            output = self.attention(backend, *operands)
            return [output, *self.torch.autograd.grad(output, operands, cotangent)]

        def head(array: Any) -> Any:
            return array[:1, :1]

        found = results("FLASH_ATTENTION", self.operands, self.cotangent)
        wide = [head(operand).detach().float().requires_grad_() for operand in self.operands]
        expected = results("MATH", wide, head(self.cotangent).float())
        return relative_errors([head(array) for array in found], expected)

    def times(self) -> tuple[dict[str, Times], dict[str, str]]:
        """Returns the times of a call without gradient and of the gradients alone, or why not."""

        def forward() -> Any:
            with self.torch.no_grad():
                return self.attention("FLASH_ATTENTION", *self.operands)

        output = self.attention("FLASH_ATTENTION", *self.operands)

        def backward() -> Any:
            return self.torch.autograd.grad(
                output, self.operands, self.cotangent, retain_graph=True
            )

        return take_turns({"forward": forward, "backward": backward}, self.wait)


def measure(problem: Problem, deadline: float) -> list[Row]:
    """Returns the rows of a problem: its times and errors, or why there are none."""
    if time.time() > deadline:
        return absent_rows(problem, [NAME], BUDGET_SPENT)
    try:
        if problem.needs or problem.repeats > 1:
            raise NotImplementedError("measured here: plain attention, a call in a program")
        measurement = Measurement(importlib.import_module("torch"), problem)
        errors, (times, failed) = measurement.errors(), measurement.times()
    except Exception as error:
        return absent_rows(problem, [NAME], reason(error))

    def known(of_directions: dict[str, Any], direction: str) -> dict[str, Any]:
        return {NAME: of_directions[direction]} if direction in of_directions else {}

    return [
        rated(
            {**row, "times": known(times, d), "absent": known(failed, d), "errors": {NAME: errors}}
        )
        for d, row in zip(DIRECTIONS, absent_rows(problem, [], ""), strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="triton-tutorial")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T")
    parser.add_argument("--budget", type=float, default=3600, help="seconds")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    settings = parser.parse_args(arguments)
    deadline = time.time() + settings.budget
    group = PRESETS[settings.preset].group(settings.lengths)
    rows = [row for problem in group.problems for row in measure(problem, deadline)]
    of_torch = {"title": group.title, **facts(), "torch": version("torch"), "rows": rows}
    write({"groups": {settings.preset: of_torch}}, settings.out)


if __name__ == "__main__":
    main()
