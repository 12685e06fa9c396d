"""What the benchmarks count and check, and that the README shows what they measured."""

import math
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import gpu
import plot
import problems
from flops import attention_flops
from problems import FEATURES, Problem

README = Path(__file__).parent.parent / "README.md"


class TestAttentionFlops:
    def test_forward_is_4_btshn(self):
        count = attention_flops(batch=2, query_length=3, key_length=5, heads=7, head_dim=11)
        assert count == 4 * 2 * 3 * 5 * 7 * 11

    def test_backward_is_two_and_a_half_times_forward(self):
        sizes = {"batch": 1, "query_length": 4, "key_length": 4, "heads": 2, "head_dim": 8}
        assert attention_flops(**sizes, backward=True) == 3.5 * attention_flops(**sizes)

    @pytest.mark.parametrize(("query_length", "key_length"), [(6, 6), (5, 3), (3, 5), (1, 9)])
    def test_causal_counts_visible_pairs(self, query_length, key_length):
        pairs = sum(j <= i for i in range(query_length) for j in range(key_length))
        count = attention_flops(
            batch=1,
            query_length=query_length,
            key_length=key_length,
            heads=1,
            head_dim=1,
            is_causal=True,
        )
        assert count == 4 * pairs


def test_readme_shows_the_newest_results():
    text = README.read_text()
    assert plot.with_table(text, "cpu", plot.read(plot.newest_results("cpu"))) == text


def results(problem, attention):
    """Output and gradients of a problem, the operands and the cotangent they belong to."""
    operands, constants, cotangent = problems.make_operands(problem)
    output = jax.jit(problems.forward(attention, problem))(operands, constants)
    _, pull = jax.jit(problems.linearize(attention))(operands, constants)
    gradients = jax.jit(problems.backward(problem))(pull, cotangent)
    return {"output": output, **gradients}, (operands, constants, cotangent)


class TestProblem:
    @pytest.mark.parametrize("feature", FEATURES)
    def test_expected_results_are_those_of_jaxflash(self, feature):
        problem = Problem(2, 32, 3, 8, "float32", is_causal=True, feature=feature)
        found, (operands, constants, cotangent) = results(
            problem, problems.jaxflash_attention(problem, "xla")
        )
        part = problem.checked_part()
        with jax.enable_x64(True):
            output, gradients = problems.expected(problem)(
                gpu.part_of(problem, operands),
                gpu.part_of(problem, constants),
                part("output", cotangent),
            )
        errors = gpu.relative_errors(gpu.part_of(problem, found), {"output": output, **gradients})
        assert set(errors) == {"output", *problem.differentiable()}
        assert max(errors.values()) < 2e-6

    def test_repeats_feed_the_result_back(self):
        once = Problem(1, 16, 2, 8, "float32")
        twice = Problem(1, 16, 2, 8, "float32", repeats=2)
        attention = problems.dense_attention(once)
        found, _ = results(twice, attention)
        first, (operands, _, _) = results(once, attention)
        again = attention(**{**operands, "query": first["output"]})
        assert jnp.allclose(found["output"], again, atol=1e-5)
        _, pull = problems.linearize(attention)(operands, {})
        (gradients,) = pull(first["value"])
        assert jnp.allclose(found["query"], gradients["query"], atol=1e-5)

    def test_documents_count_what_they_see(self):
        whole, documents = (Problem(2, 64, 3, 8, feature=f) for f in ("plain", "8 documents"))
        for direction in gpu.DIRECTIONS:
            assert whole.flops(direction) == 8 * documents.flops(direction)

    def test_backward_counts_without_forward(self):
        problem = Problem(2, 64, 3, 8)
        assert problem.flops("backward") == 2.5 * problem.flops("forward")


def row(problem, direction, times, errors, absent=None):
    """A row of the GPU benchmark's results: seconds and errors by contender."""
    return gpu.rated(
        {
            "direction": direction,
            **asdict(problem),
            "times": {name: {"median_s": seconds} for name, seconds in times.items()},
            "errors": {name: {"output": error} for name, error in errors.items()},
            "absent": absent or {},
        }
    )


class TestGpuRows:
    PROBLEM = Problem(1, 1024, 8, 64)

    def test_ratio_is_how_many_times_as_fast_jaxflash_is(self):
        of = row(self.PROBLEM, "forward", {"jaxflash": 1.0, "rival": 3.0}, {})
        assert of["ratio"] == {"rival": 3.0}
        assert of["tflops"]["jaxflash"] == self.PROBLEM.flops("forward") / 1e12

    @pytest.mark.parametrize(("error", "wrong"), [(1e-3, []), (0.5, ["x"]), (math.nan, ["x"])])
    def test_large_errors_and_nan_are_wrong(self, error, wrong):
        assert row(self.PROBLEM, "forward", {}, {"x": error})["wrong"] == wrong

    def test_table_shows_rates_ratios_absent_and_wrong(self):
        rows = [
            row(
                self.PROBLEM,
                direction,
                {"jaxflash": seconds, "rival": 2 * seconds},
                {"jaxflash": 1e-3, "rival": 1.0},
                {"other": "ImportError: not here"},
            )
            for direction, seconds in (("forward", 1e-5), ("backward", 2e-5))
        ]
        text = plot.lengths_table(rows)
        rate = f"{self.PROBLEM.flops('forward') / 1e-5 / 1e12:.3g}"
        assert f"| forward | H=64 | full | {rate} (-, 2.00!) |" in text
        assert "as fast as rival, geometric mean: forward 2.00 (least 2.00)" in text
        assert "Absent from 2 rows: other: ImportError: not here" in text

    def test_features_are_compared_with_the_plain_call(self):
        cap = Problem(1, 1024, 8, 64, feature="soft cap 50")
        rows = [
            row(self.PROBLEM, "forward", {"jaxflash": 0.001}, {}),
            row(cap, "forward", {"jaxflash": 0.0015, "dense xla": 0.004}, {}),
        ]
        assert "| soft cap 50 | 1.50 | 1.50 | dense xla 4.00 |" in plot.features_table(rows)

    def test_memory_is_what_comes_on_top(self):
        rows = [
            {"contender": "x", "arrays_bytes": 2**20, "peak_bytes": 3 * 2**20},
            {"contender": "y", "compiled_temp_bytes": 2**30, "absent": "out of memory"},
        ]
        text = plot.memory_table(rows)
        assert "| x | 1 | 2 |  |  |" in text
        assert "| y |  |  | 1024 | out of memory |" in text


def test_groups_are_what_they_promise():
    for problem in gpu.grid(gpu.LENGTHS).problems:
        assert problem.batch * problem.length == gpu.TOKENS
        assert problem.heads * problem.head_dim == gpu.HIDDEN
    for make in gpu.GROUPS.values():
        group = make(gpu.QUICK_LENGTHS)
        assert len(set(group.problems)) == len(group.problems)
        assert set(group.rivals) <= {*gpu.CONTENDERS, gpu.TORCH}


def test_a_contender_that_cannot_is_absent_and_the_others_are_traced():
    problem = Problem(1, 16, 2, 8, feature="soft cap 50")
    with pytest.raises(NotImplementedError, match="has no soft cap"):
        gpu.trace("jax.nn xla", problem)
    gpu.trace("dense xla", problem).map(gpu.lower_for_cuda)
