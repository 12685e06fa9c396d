"""Times torch's SDPA with its flash backend: the part of gpu.py that runs in its own process.

python benchmarks/gpu_torch.py problems.json times.json
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from harness import reason, take_turns, version, write


def relative_errors(results: list[Any], expected: list[Any]) -> float:
    """Returns the largest relative error, in the Frobenius norm, of any result."""
    pairs = zip(results, expected, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


class Measurement:
    """Attention by torch of one problem, on random numbers `[B, N, T, H]`."""

    def __init__(self, torch: Any, problem: dict[str, Any]):
        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.is_causal = problem["is_causal"]
        shape = [problem[size] for size in ("batch", "heads", "length", "head_dim")]
        generator = torch.Generator(self.device).manual_seed(0)
        *self.operands, self.cotangent = (
            torch.randn(shape, generator=generator, device=self.device)
            .to(getattr(torch, problem["dtype"]))
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

    def error(self) -> float:
        """Returns the relative error of output and gradients of one head against float32."""

        def results(backend: str, operands: list[Any], cotangent: Any) -> list[Any]:
            output = self.attention(backend, *operands)
            return [output, *self.torch.autograd.grad(output, operands, cotangent)]

        def head(array: Any) -> Any:
            return array[:1, :1]

        found = results("FLASH_ATTENTION", self.operands, self.cotangent)
        wide = [head(operand).detach().float().requires_grad_() for operand in self.operands]
        expected = results("MATH", wide, head(self.cotangent).float())
        return relative_errors([head(array) for array in found], expected)

    def times(self) -> dict[str, Any]:
        """Returns the times of a call without gradient, and of the gradients alone."""

        def forward() -> Any:
            with self.torch.no_grad():
                return self.attention("FLASH_ATTENTION", *self.operands)

        output = self.attention("FLASH_ATTENTION", *self.operands)

        def backward() -> Any:
            return self.torch.autograd.grad(
                output, self.operands, self.cotangent, retain_graph=True
            )

        return take_turns({"forward": forward, "backward": backward}, self.wait)


def measure(problem: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Returns what is known of a problem: its times and its error, or why there are none."""
    if time.time() > deadline:
        return {"absent": "the budget of time was spent"}
    try:
        measurement = Measurement(importlib.import_module("torch"), problem)
        return {"error": measurement.error(), "times": measurement.times()}
    except Exception as error:
        return {"absent": reason(error)}


def main(source: Path, target: Path) -> None:
    request = json.loads(source.read_text())
    measured = [measure(problem, request["deadline"]) for problem in request["problems"]]
    write({"torch": version("torch"), "measured": measured}, target)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
