"""`python -m jaxflash.bench`: what it counts, checks and shows, and that the README shows it."""

import contextlib
import functools
import itertools
import json
import math
import re
import signal
import sys
import types
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import readme
import torch_flash
from jaxflash import _native, _platforms
from jaxflash.bench import __main__ as command
from jaxflash.bench import (
    contenders,
    measure,
    memory,
    plots,
    problems,
    programs,
    report,
    results,
    timing,
)
from jaxflash.bench.contenders import CONTENDERS, Contender
from jaxflash.bench.costs import attention_bytes, attention_flops, visible_pairs
from jaxflash.bench.presets import HIDDEN, PRESETS, TOKENS
from jaxflash.bench.problems import DIRECTIONS, FEATURES, Inputs, Problem
from jaxflash.bench.programs import trace


@pytest.mark.parametrize("count", [3, 4, 5])
def test_nobody_always_comes_after_the_same_one(count):
    """A processor slows down after work that takes much power, whoever did it."""
    names = [str(i) for i in range(count)]
    order = [name for turn in range(7) for name in timing.order_of_turn(names, turn)]
    assert sorted(order) == sorted(names * 7)
    pairs = list(itertools.pairwise(order))
    for name in names:
        before = [first for first, second in pairs if second == name]
        assert max(before.count(other) for other in names) <= 0.7 * len(before)


def test_who_fails_while_being_timed_stops_nobody(monkeypatch):
    monkeypatch.setattr(timing, "MEASUREMENT_SECONDS", 1e-6)
    calls = itertools.count()

    def fails_late():
        if next(calls) > 20:
            raise RuntimeError("out of memory\nand more")

    def fails():
        raise ValueError("never")

    everybody = {"good": lambda: None, "late": fails_late, "never": fails, "quits": sys.exit}
    monkeypatch.setattr(timing, "batch_size", lambda call, wait: (call(), (5, 0.1))[1])
    times, failed = timing.take_turns(everybody, lambda result: None)
    assert set(times) == {"good"}
    assert times["good"]["measurements"] == timing.MOST_TURNS
    assert failed == {
        "late": "RuntimeError: out of memory",
        "never": "ValueError: never",
        "quits": "SystemExit: ",
    }


def test_an_interrupt_is_nobodys_failure(monkeypatch):
    monkeypatch.setattr(timing, "MEASUREMENT_SECONDS", 1e-6)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timing.take_turns({"interrupted": interrupted}, lambda result: None)


class TestCosts:
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("window", [None, 0, 2, (1, None), (None, 3), (2, 1)])
    @pytest.mark.parametrize(("query_length", "key_length"), [(6, 6), (5, 3), (3, 5), (1, 9)])
    @pytest.mark.parametrize("offset", [0, 2, -4])
    def test_pairs_are_those_that_are_visible(
        self, is_causal, window, query_length, key_length, offset
    ):
        left, right = window if isinstance(window, tuple) else (window, window)
        i = np.arange(query_length)[:, None] + offset
        j = np.arange(key_length)
        visible = (j <= i) | (not is_causal)
        visible &= (left is None) | (j >= i - (left or 0))
        visible &= (right is None) | (j <= i + (right or 0))
        found = visible_pairs(
            query_length,
            key_length,
            is_causal=is_causal,
            local_window_size=window,
            query_offset=offset,
        )
        assert found == visible.sum()

    def test_forward_is_4_btshn(self):
        assert attention_flops(2 * 7 * visible_pairs(3, 5), 11) == 4 * 2 * 3 * 5 * 7 * 11

    def test_backward_is_two_and_a_half_times_forward(self):
        assert attention_flops(9, 8, backward=True) == 2.5 * attention_flops(9, 8)

    def test_bytes_are_those_of_every_array_once(self):
        query, key, rows = 2 * 5 * 4 * 8, 2 * 5 * 2 * 8, 2 * 5 * 4
        assert attention_bytes(query, key, rows, 2) == 2 * (2 * query + 2 * key) + 4 * rows
        backward = attention_bytes(query, key, rows, 2, backward=True)
        assert backward == 2 * (4 * query + 4 * key) + 4 * rows


def results_of(problem, attention):
    """Output and gradients of a problem, and operands, constants and cotangent."""
    arguments = problems.make_operands(problem)
    return jax.jit(problems.forward_and_backward(attention, problem))(*arguments), arguments


VARIANTS = [{"feature": feature} for feature in FEATURES] + [{"kv_heads": 2}, {"window": 5}]


class TestProblem:
    @pytest.mark.parametrize("variant", VARIANTS, ids=str)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_expected_results_are_those_of_jaxflash(self, variant, is_causal):
        problem = Problem(2, 32, 4, 8, "float32", is_causal, **variant)
        found, (operands, constants, cotangent) = results_of(
            problem, problems.jaxflash_attention(problem, "xla")
        )
        with jax.enable_x64(True):
            correct = problems.expected(problem)(
                problem.checked_parts(operands),
                problem.checked_parts(constants),
                problem.checked_part("output", cotangent),
            )
        errors = measure.relative_errors(problem.checked_parts(found), correct)
        assert set(errors) == {"output", *problem.differentiable()}
        assert max(errors.values()) < 2e-6

    def test_reference_in_blocks_is_the_reference(self, monkeypatch):
        problem = Problem(1, 30, 2, 8, "float32", is_causal=True, feature="bias [B,N,T,S]")
        whole, _ = results_of(problem, problems.dense_attention(problem))
        monkeypatch.setattr(problems, "REFERENCE_ROWS", 13)  # 10 is the largest divisor below
        blocks, _ = results_of(problem, problems.blockwise_attention(problem))
        assert max(measure.relative_errors(blocks, whole).values()) < 1e-6

    def test_repeats_feed_the_result_back(self):
        once = Problem(1, 16, 2, 8, "float32")
        twice = Problem(1, 16, 2, 8, "float32", repeats=2)
        attention = problems.dense_attention(once)
        found, _ = results_of(twice, attention)
        first, (operands, _, _) = results_of(once, attention)
        again = attention(Inputs(**{**operands, "query": first["output"]}))
        assert jnp.allclose(found["output"], again, atol=1e-5)
        _, pull = problems.linearize(attention)(operands, {})
        (gradients,) = pull(first["value"])
        assert jnp.allclose(found["query"], gradients["query"], atol=1e-5)

    @pytest.mark.parametrize("length", [1, 7, 8, 100])
    def test_documents_of_different_lengths(self, length):
        problem = Problem(1, length, 1, 8, feature="8 documents")
        _, constants, _ = problems.make_operands(problem)
        ids = np.asarray(constants["segment_ids"])[0]
        pairs = int((ids[:, None] == ids).sum())
        assert problem.flops("forward") == attention_flops(pairs, 8)

    def test_errors_of_zeros_and_of_no_numbers(self):
        correct = {"zeros": np.zeros(4), "numbers": np.ones(4)}
        right = measure.relative_errors(correct, correct)
        assert right == {"zeros": 0, "numbers": 0}
        wrong = measure.relative_errors({n: x * np.nan for n, x in correct.items()}, correct)
        assert wrong == dict.fromkeys(correct, measure.NOT_A_NUMBER)
        off = measure.relative_errors({n: x + 1e-2 for n, x in correct.items()}, correct)
        assert off == pytest.approx(dict.fromkeys(correct, 1e-2))

    def test_documents_count_what_they_see(self):
        whole, documents = (Problem(2, 64, 3, 8, feature=f) for f in ("plain", "8 documents"))
        for direction in DIRECTIONS:
            assert whole.flops(direction) == 8 * documents.flops(direction)

    def test_masks_count_what_is_visible(self):
        full, causal, window = (
            Problem(2, 64, 3, 8, is_causal=c, window=w).flops("forward")
            for c, w in ((False, None), (True, None), (True, 7))
        )
        assert causal / full == 65 / 128
        assert window == 4 * 2 * 3 * 8 * visible_pairs(64, 64, local_window_size=(7, 0))

    def test_backward_counts_without_forward(self):
        problem = Problem(2, 64, 3, 8)
        assert problem.flops("backward") == 2.5 * problem.flops("forward")


class TestContenders:
    def test_what_it_lacks_is_named(self):
        problem = Problem(1, 16, 2, 8, feature="soft cap 50")
        with pytest.raises(NotImplementedError, match="has no soft cap"):
            trace("jax.nn xla", problem, "forward", "cpu")

    def test_scores_that_would_fill_the_memory_are_not_tried(self):
        problem = Problem(1, 2**16, 8, 64)
        with pytest.raises(NotImplementedError, match=r"holds all scores, 128\.0 GiB"):
            trace("jax.nn xla", problem, "forward", "cpu")

    @pytest.mark.parametrize(
        ("statistics", "most"), [({"bytes_limit": 1000}, 100), (None, 10 * 2**30)]
    )
    def test_scores_take_a_share_of_the_devices_memory(self, statistics, most, monkeypatch):
        gpu = types.SimpleNamespace(memory_stats=lambda: statistics)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
        assert contenders.most_scores_bytes("gpu") == most
        assert contenders.most_scores_bytes("cpu") == 2**30

    @pytest.mark.parametrize("name", ["flash-attn-jax", "dew", "flash-attn3-jax"])
    def test_bindings_of_flash_attention_are_called_by_their_arguments(self, name, monkeypatch):
        asked = {}

        def flash_mha(q, k, v, softmax_scale=None, is_causal=False, window_size=(-1, -1)):
            asked.update(is_causal=is_causal, window_size=window_size)
            return q

        module = types.SimpleNamespace(flash_mha=flash_mha)
        monkeypatch.setitem(sys.modules, CONTENDERS[name].module, module)
        trace(name, Problem(1, 16, 2, 8, is_causal=True, kv_heads=1), "forward", "gpu")
        assert asked == {"is_causal": True, "window_size": (-1, -1)}

    @pytest.mark.parametrize("name", ["flash-attn-jax", "dew"])
    @pytest.mark.parametrize(("is_causal", "window"), [(False, (5, 5)), (True, (5, 0))])
    def test_window_of_flash_attention(self, name, is_causal, window, monkeypatch):
        asked = []
        module = types.SimpleNamespace(
            flash_mha=lambda q, k, v, is_causal, window_size: asked.append(window_size) or q
        )
        monkeypatch.setitem(sys.modules, CONTENDERS[name].module, module)
        problem = Problem(1, 16, 2, 8, is_causal=is_causal, window=5)
        trace(name, problem, "forward", "gpu")
        assert set(asked) == {window}

    def test_tokamax_takes_the_arguments_of_jax_nn_and_a_soft_cap(self, monkeypatch):
        def dot_product_attention(query, key, value, *, bias, mask, is_causal, logits_soft_cap):
            assert (bias, mask, is_causal, logits_soft_cap) == (None, None, False, 50.0)
            return query

        module = types.SimpleNamespace(dot_product_attention=dot_product_attention)
        monkeypatch.setitem(sys.modules, "tokamax", module)
        trace("tokamax", Problem(1, 16, 2, 8, feature="soft cap 50"), "forward", "gpu")

    def test_kvax_gets_positions_segments_and_a_mask(self, monkeypatch):
        def create_attention_mask(*places, calc_bwd_mask, mesh):
            assert [place.shape for place in places] == [(2, 16)] * 4
            return "mask"

        def flash_attention(query, key, value, *places_and_mask, scale, mesh):
            assert places_and_mask[-1] == "mask"
            assert scale == 0.25
            return query

        operations = types.SimpleNamespace(
            create_attention_mask=create_attention_mask, flash_attention=flash_attention
        )
        utilities = types.SimpleNamespace(attention_specs=lambda *_: contextlib.nullcontext())
        monkeypatch.setitem(sys.modules, "kvax.ops", operations)
        monkeypatch.setitem(sys.modules, "kvax.utils", utilities)
        problem = Problem(2, 16, 2, 16, is_causal=True, feature="8 documents")
        trace("kvax", problem, "forward", "gpu")
        with pytest.raises(NotImplementedError, match="always causal"):
            trace("kvax", Problem(2, 16, 2, 16), "forward", "gpu")

    def test_pallas_triton_is_traced(self):
        trace("pallas triton", Problem(1, 128, 2, 64, is_causal=True), "backward", "gpu")

    def test_pallas_mosaic_gets_a_scaled_query(self, monkeypatch):
        module = types.SimpleNamespace(
            TuningConfig=lambda **settings: settings,
            attention=lambda query, key, value, config: query if config["causal"] else key,
        )
        monkeypatch.setitem(sys.modules, CONTENDERS["pallas mosaic"].module, module)
        problem = Problem(1, 8, 2, 16, is_causal=True)
        query = jnp.ones(problem.query.shape)
        scaled = CONTENDERS["pallas mosaic"].attention(problem, "gpu")(Inputs(query, query, query))
        assert (scaled == 0.25).all()

    def test_those_not_installed_or_of_other_platforms_are_left_out(self):
        names = contenders.default_contenders("cpu")
        assert names == ["jaxflash", "jax.nn xla", "dense"]
        missing = Contender(problems.dense_attention, module="no_such_package.at_all")
        assert not contenders.is_installed(missing)


def row(problem, direction, times, errors, absent=None, matmul_tflops=None, memory=None):
    """A row of results: seconds, errors and workspace by contender."""
    return results.rated(
        {
            "direction": direction,
            **problem.to_json(),
            "times": {
                name: {"median_s": seconds, "quartiles_s": [seconds, seconds]}
                for name, seconds in times.items()
            },
            "matmul_tflops": matmul_tflops,
            "errors": {name: {"output": error} for name, error in errors.items()},
            "memory": {name: {"workspace_bytes": size} for name, size in (memory or {}).items()},
            "absent": absent or {},
        }
    )


class TestRows:
    PROBLEM = Problem(1, 1024, 8, 64)

    def test_ratio_is_how_many_times_as_fast_jaxflash_is(self):
        of = row(self.PROBLEM, "forward", {"jaxflash": 1.0, "rival": 3.0}, {})
        assert of["ratio"] == {"rival": 3.0}
        assert of["tflops"]["jaxflash"] == self.PROBLEM.flops("forward") / 1e12

    @pytest.mark.parametrize(("error", "wrong"), [(1e-3, []), (0.5, ["x"]), (math.nan, ["x"])])
    def test_large_errors_and_nan_are_wrong(self, error, wrong):
        assert row(self.PROBLEM, "forward", {}, {"x": error})["wrong"] == wrong

    def test_who_is_wrong_is_not_the_best(self):
        times = {"jaxflash": 2.0, "wrong": 1.0, "right": 3.0}
        of = row(self.PROBLEM, "forward", times, {"wrong": 1.0, "right": 0.0})
        assert results.best_rival(of) == "right"

    def test_who_is_wrong_counts_nowhere_as_best(self, tmp_path, monkeypatch):
        times = {"jaxflash": 2.0, "rival": 4.0, "lying": 1.0}
        rows = [row(self.PROBLEM, d, times, {"lying": 1.0, "rival": 0.0}) for d in DIRECTIONS]
        shares = [line.split("|")[9].strip() for line in report.details(rows).splitlines()[2:]]
        assert shares == ["1.00", "0.50", ""] * 2
        said = "Times as fast as lying, geometric mean: both were never right."
        assert report.mean_ratio(rows, "lying") == said
        drawn = []
        monkeypatch.setattr(plots, "_draw", lambda group, path, quantity: drawn.append(quantity))
        plots.draw_speed({"rows": rows}, tmp_path / "x.png")
        (quantity,) = drawn
        assert quantity.of(rows[0], "lying") is None
        assert quantity.of(rows[0], "rival") > 0

    def test_reasons_that_are_shared_are_said_once(self):
        absent = {"a": "no", "b": "no", "c": "other"}
        rows = [row(self.PROBLEM, direction, {}, {}, absent) for direction in DIRECTIONS]
        assert report.absences(rows) == [
            "Absent from 1 forward and 1 backward: a, b: no",
            "Absent from 1 forward and 1 backward: c: other",
        ]

    def test_memory_that_was_not_measured_is_said(self):
        of = row(self.PROBLEM, "backward", {"jaxflash": 1.0}, {}, memory={"jaxflash": 2**20})
        of["memory"]["jaxflash"]["not_measured"] = "no room"
        said = "Memory not measured in 1 backward: jaxflash: no room"
        assert report.not_measured([of]) == [said]
        assert "| not measured |" in report.details([of])

    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (0, "0"),
            (100, "100 B"),
            (2048, "2 KiB"),
            (2**20 // 2, "0.5"),
            (2**24, "16"),
            (5000 * 2**20, "5000"),
        ],
    )
    def test_sizes_are_readable(self, size, text):
        assert report.mebibytes(size) == text

    def test_a_picture_says_what_it_leaves_out(self, tmp_path, monkeypatch):
        titles = []
        monkeypatch.setattr(
            plots, "_finish", lambda figure, axes, title, path: titles.append(title)
        )
        rows = [
            row(Problem(1, length, 8, h), direction, {"jaxflash": 1.0}, {}, matmul_tflops=1.0)
            for length in (512, 1024)
            for h in (8, 16, 32, 64, 128)
            for direction in DIRECTIONS
        ]
        for shown in (rows, [r for r in rows if r["head_dim"] > 8]):
            plots.draw_speed({"rows": shown, "device": "x"}, tmp_path / "x.png")
        left_out, whole = titles
        assert left_out.endswith("\n(the first 4 of 5 kinds of problems)")
        assert "\n" not in whole

    def test_summary_shows_rates_ratios_shares_memory_absent_and_wrong(self):
        rows = [
            row(
                self.PROBLEM,
                direction,
                {"jaxflash": seconds, "rival": 2 * seconds, "wrong": seconds / 2},
                {"jaxflash": 1e-3, "wrong": 1.0},
                {"other": "ImportError: not here"},
                matmul_tflops=2 * self.PROBLEM.flops(direction) / seconds / 1e12,
                memory={"jaxflash": 2**20, "rival": 2**24},
            )
            for direction, seconds in (("forward", 1e-5), ("backward", 2e-5))
        ]
        text = "\n".join([report.speed(rows), report.memory_table(rows), *report.absences(rows)])
        rate = f"{self.PROBLEM.flops('forward') / 1e-5 / 1e12:.3g}"
        assert f"| forward   | full    | {rate} (2.00x, 50%) |" in text
        assert "Times as fast as rival, geometric mean: forward 2.00 (least 2.00)" in text
        assert "Absent from 1 forward and 1 backward: other: ImportError: not here" in text
        assert "| backward  | full    | 1 / 16 |" in text
        assert "1.0e+00!" in report.details(rows)

    def test_problems_are_told_apart_by_what_differs(self):
        rows = [
            row(Problem(16384 // length, length, 2048 // h, h), "forward", {"jaxflash": 1e-3}, {})
            for length in (512, 1024)
            for h in (64, 128)
        ]
        assert report.distinguishing(rows) == ["head_dim", "heads", "is_causal"]

    def test_merging_keeps_what_each_file_knows(self):
        ours = row(self.PROBLEM, "forward", {"jaxflash": 1.0}, {}, {"rival": "no"}, 100.0)
        theirs = row(self.PROBLEM, "forward", {"rival": 2.0}, {})
        files = [{"groups": {"g": {"title": "t", "rows": [of]}}} for of in (ours, theirs)]
        (both,) = results.merged(files)["groups"]["g"]["rows"]
        assert both["ratio"] == {"rival": 2.0}
        assert both["absent"] == {}
        assert both["matmul_tflops"] == 100.0


class TestFacts:
    def test_of_a_gpu(self, monkeypatch):
        answer = types.SimpleNamespace(stdout="NVIDIA H200, 580.1\nNVIDIA H200, 580.1\n")
        monkeypatch.setattr(results.subprocess, "run", lambda *_, **__: answer)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        found = results.facts("abc")
        assert (found["device"], found["driver"]) == ("NVIDIA H200", "580.1")
        assert (found["commit"], found["jax"]) == ("abc", jax.__version__)

    def test_of_a_gpu_without_nvidia_smi(self, monkeypatch):
        def missing(*_, **__):
            raise FileNotFoundError

        monkeypatch.setattr(results.subprocess, "run", missing)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        found = results.facts("abc")
        assert (found["device"], found["driver"]) == (jax.devices()[0].device_kind, None)

    def test_of_an_installed_package_there_is_no_commit(self, monkeypatch, tmp_path):
        monkeypatch.setattr(results, "__file__", str(tmp_path / "a" / "b" / "results.py"))
        assert results.commit() is None


class TestPresets:
    def test_fa3_has_its_tokens_and_hidden_size(self):
        for problem in PRESETS["fa3"].group().problems:
            assert problem.batch * problem.length == TOKENS
            assert problem.heads * problem.head_dim == HIDDEN

    @pytest.mark.parametrize("name", PRESETS)
    def test_problems_differ_and_contenders_exist(self, name):
        group = PRESETS[name].group()
        assert len(set(group.problems)) == len(group.problems)
        assert set(group.contenders or []) <= set(CONTENDERS)

    @pytest.mark.parametrize(
        ("lengths", "tokens"), [(None, "16384"), ([32768, 1024], "16384 to 32768"), ([48], "16368")]
    )
    def test_titles_say_how_many_tokens_there_are(self, lengths, tokens):
        title = PRESETS["fa3"].group(lengths).title
        assert title == f"{tokens} tokens, hidden size 2048, bfloat16"

    def test_lengths_can_be_chosen(self):
        problems = PRESETS["laptop"].group([48]).problems
        assert {problem.length for problem in problems} == {48}


class TestPeak:
    """Memory by a device's allocator, which does not forget its peak."""

    PROBLEM = Problem(1, 8, 1, 8, "float32")

    @pytest.mark.parametrize(
        ("most", "found"),
        [
            (150, {"measured_bytes": 110}),
            (100, {"not_measured": "no more memory was in use than when operands were made"}),
        ],
    )
    def test_is_counted_from_what_was_in_use(self, most, found, monkeypatch):
        statistics = iter([(40, 100), (60, most)])

        def memory_stats():
            in_use, peak = next(statistics)
            return {"bytes_in_use": in_use, "peak_bytes_in_use": peak}

        traced = trace("dense", self.PROBLEM, "backward", "cpu")
        monkeypatch.setattr(memory, "trace", lambda *_: traced)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        gpu = types.SimpleNamespace(memory_stats=memory_stats)
        monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
        assert memory.measure_peak("dense", self.PROBLEM) == found

    def test_an_error_is_said_as_elsewhere(self, capsys):
        problem = replace(self.PROBLEM, feature="soft cap 50")
        command.main(["--peak-of", "jax.nn xla", json.dumps(problem.to_json())])
        found = json.loads(capsys.readouterr().out)
        assert found == {"not_measured": "NotImplementedError: has no soft cap"}

    def test_how_a_process_ended_is_said(self, monkeypatch):
        ended = types.SimpleNamespace(returncode=-9, stdout="", stderr="")
        monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: ended)
        found = memory.measured_elsewhere("dense", self.PROBLEM)
        assert found == {"not_measured": "the process ended with -9"}


@pytest.fixture
def hasty(monkeypatch):
    """Measures for no longer than it has to."""
    monkeypatch.setattr(timing, "MEASUREMENT_SECONDS", 1e-6)
    for sizes in (measure.MATMUL_SIZE, measure.COPIED_BYTES):
        for backend in sizes:
            monkeypatch.setitem(sizes, backend, 64)


def only_group(path):
    """The group of a file that has one."""
    (group,) = results.read(path)["groups"].values()
    return group


OWN_SHAPE = ["--batch", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"]


@pytest.mark.usefixtures("hasty")
class TestCommand:
    def test_measures_checks_and_draws(self, tmp_path, capsys, monkeypatch):
        def failing(problem):
            raise RuntimeError("out of luck\nand more")

        def one_way(problem):
            attention = jax.custom_jvp(problems.dense_attention(problem))

            @attention.defjvp
            def refuse(primals, tangents):
                raise NotImplementedError("no gradient")

            return attention

        def quitting(problem):
            sys.exit("no licence")

        everything = functools.partial(Contender, platforms=("cpu", "gpu"))
        monkeypatch.setitem(CONTENDERS, "quitting", everything(quitting, contenders.EVERYTHING))
        monkeypatch.setitem(CONTENDERS, "failing", everything(failing, contenders.EVERYTHING))
        monkeypatch.setitem(CONTENDERS, "one-way", everything(one_way, contenders.EVERYTHING))
        lying = everything(lambda problem: lambda inputs: inputs.query, contenders.EVERYTHING)
        monkeypatch.setitem(CONTENDERS, "lying", lying)
        out = tmp_path / "found.json"
        command.main([*OWN_SHAPE, "--lengths", "16", "32", "--out", str(out)])
        group = only_group(out)
        rows = group["rows"]
        assert [(r["length"], r["is_causal"], r["direction"]) for r in rows] == [
            (length, is_causal, direction)
            for length in (16, 32)
            for is_causal in (False, True)
            for direction in DIRECTIONS
        ]
        for of_row in rows:
            assert of_row["absent"]["failing"] == "RuntimeError: out of luck"
            assert of_row["absent"]["quitting"] == "SystemExit: no licence"
            assert of_row["wrong"] == ["lying"]
            assert ("one-way" in of_row["times"]) == (of_row["direction"] == "forward")
            assert of_row["matmul_tflops"] > 0
            assert {"jaxflash", "jax.nn xla"} <= set(of_row["tflops"])
            assert of_row["memory"]["jaxflash"]["workspace_bytes"] > 0
        assert group["bytes_per_second"] > 0
        pictures = {path.name for path in tmp_path.glob("*.png")}
        assert pictures == {
            f"found-b2-n4-h8-float32-k2-{p}.png" for p in ("speed", "memory", "roofline")
        }
        printed = capsys.readouterr().out
        assert "Absent from 4 forward and 4 backward: failing: RuntimeError: out of luck" in printed
        assert "Absent from 4 backward: one-way: NotImplementedError: no gradient" in printed

    @pytest.mark.parametrize("prevented", ["lower_expected", "run"])
    def test_without_the_reference_nobody_is_checked_and_it_is_said_why(
        self, prevented, tmp_path, monkeypatch
    ):
        def failing(*_):
            raise RuntimeError("no room")

        def unlucky(problem):
            return types.SimpleNamespace(compile=lambda _: failing)

        replaced = failing if prevented == "lower_expected" else unlucky
        monkeypatch.setattr(programs, "lower_expected", replaced)
        out = tmp_path / "found.json"
        command.main(["--heads", "1", "--lengths", "8", "--no-plots", "--out", str(out)])
        for of_row in only_group(out)["rows"]:
            assert of_row["absent"] == {"reference": "RuntimeError: no room"}
            assert {"jaxflash", "dense"} <= set(of_row["times"])
            assert of_row["errors"] == {}

    def test_without_the_yardsticks_contenders_are_timed_all_the_same(self, tmp_path, monkeypatch):
        def no_room(*_):
            raise RuntimeError("no room")

        monkeypatch.setattr(measure, "normals", no_room)
        monkeypatch.setattr(measure.jnp, "negative", no_room)
        out = tmp_path / "found.json"
        command.main(["--heads", "1", "--lengths", "8", "--no-plots", "--out", str(out)])
        group = only_group(out)
        assert group["bytes_per_second"] is None
        for of_row in group["rows"]:
            assert of_row["matmul_tflops"] is None
            assert of_row["absent"] == {measure.MATMUL: "RuntimeError: no room"}
            assert "jaxflash" in of_row["times"]

    def test_operands_without_room_are_blamed(self, tmp_path, monkeypatch):
        def no_room(*_):
            raise RuntimeError("no room")

        monkeypatch.setattr(measure, "make_operands", no_room)
        out = tmp_path / "found.json"
        command.main(["--heads", "1", "--lengths", "8", "--no-plots", "--out", str(out)])
        for of_row in only_group(out)["rows"]:
            assert set(of_row["absent"].values()) == {"operands: RuntimeError: no room"}

    @pytest.mark.usefixtures("native")
    def test_pure_jax_under_jaxflashs_name_is_warned_of(self, tmp_path, capsys, monkeypatch):
        def limitation(self, config, operands, wanted):
            return "no kernel for it" if wanted else None

        monkeypatch.setattr(_platforms.Cpu, "limitation", limitation)
        monkeypatch.setattr(_native, "_warn_once", lambda message: None)
        titles = []
        monkeypatch.setattr(plots, "_finish", lambda *arguments: titles.append(arguments[2]))
        out = tmp_path / "found.json"
        arguments = ["--heads", "1", "--lengths", "8", "--contenders", "jaxflash", "dense"]
        command.main([*arguments, "--out", str(out)])
        why = 'NotImplementedError: implementation="native": not on platform cpu: no kernel for it'
        for of_row in only_group(out)["rows"]:
            in_pure_jax = of_row["direction"] == "backward"
            assert of_row["times"]["jaxflash"].get("pure_jax") == (why if in_pure_jax else None)
            assert "pure_jax" not in of_row["times"]["dense"]
        printed = capsys.readouterr().out
        assert f"Warning: pure JAX, not the kernels, in 2 backward: jaxflash: {why}" in printed
        assert "* pure JAX, not the kernels:" in printed
        assert printed.count("| jaxflash in pure JAX |") == 2
        summary = printed.partition("* pure JAX")[2]
        for direction, star in (("forward", ""), ("backward", r"\*")):
            assert re.search(rf"\| {direction} +\| full +\| +[0-9.e+]+{star} \(", summary)
        assert "(jaxflash in pure JAX, not its kernels)" in titles[0]

    @pytest.mark.usefixtures("native")
    def test_kernels_are_not_warned_of(self, tmp_path, capsys):
        out = tmp_path / "found.json"
        command.main(["--heads", "1", "--lengths", "8", "--no-plots", "--out", str(out)])
        assert "pure JAX" not in capsys.readouterr().out
        assert not any(map(results.why_pure_jax, only_group(out)["rows"]))

    def test_one_length_is_drawn_in_bars(self, tmp_path):
        out = tmp_path / "found.json"
        arguments = ["--heads", "1", "--lengths", "16", "--out", str(out)]
        command.main(arguments)
        assert (tmp_path / "found-b1-n1-h64-float32-speed.png").exists()

    def test_a_wrong_result_of_jaxflash_fails(self, tmp_path, monkeypatch):
        lying = Contender(lambda problem: lambda inputs: inputs.query)
        monkeypatch.setitem(CONTENDERS, "jaxflash", lying)
        arguments = ["--heads", "1", "--lengths", "8", "--no-plots", "--out", str(tmp_path / "x")]
        with pytest.raises(SystemExit, match="jaxflash has wrong results in 4 rows"):
            command.main([*arguments, "--contenders", "jaxflash"])

    def test_what_the_budget_leaves_out_is_said_and_other_groups_are_kept(self, tmp_path, capsys):
        out = tmp_path / "found.json"
        results.write({"groups": {"other": {"title": "kept", "rows": []}}}, out)
        arguments = ["--preset", "gpt2", "--budget", "0", "--out", str(out)]
        command.main(arguments)
        groups = results.read(out)["groups"]
        assert set(groups) == {"other", "gpt2"}
        reasons = {why for of in groups["gpt2"]["rows"] for why in of["absent"].values()}
        assert reasons == {results.BUDGET_SPENT}
        assert results.BUDGET_SPENT in capsys.readouterr().out

    def test_an_interrupt_leaves_what_was_measured(self, tmp_path, capsys, monkeypatch, request):
        problems_measured = itertools.count()

        def measure_two(prepared):
            if next(problems_measured) == 2:
                signal.raise_signal(signal.SIGINT)
            return original(prepared)

        original = measure.measure
        monkeypatch.setattr(measure, "measure", measure_two)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
        request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
        out = tmp_path / "found.json"
        results.write({"groups": {"gpt2": {"title": "kept", "rows": []}}}, out)
        arguments = ["--preset", "laptop", "gpt2", "--lengths", "8", "16", "--out", str(out)]
        with pytest.raises(SystemExit) as error:
            command.main([*arguments, "--contenders", "dense"])
        assert error.value.code == 130
        groups = results.read(out)["groups"]
        assert groups["gpt2"]["title"] == "kept"
        rows = groups["laptop"]["rows"]
        assert [(row["length"], row["is_causal"]) for row in rows] == [
            (length, is_causal) for length in (8, 16) for is_causal in (False, True) for _ in "fb"
        ]
        assert all("dense" in row["times"] for row in rows[:4])
        assert [row["absent"] for row in rows[4:]] == [{"dense": results.INTERRUPTED}] * 4
        printed = capsys.readouterr()
        assert f"interrupted: what was measured before is in {out}" in printed.err
        assert "Absent from 2 forward and 2 backward: dense: the run was" in printed.out

    def test_an_interrupt_of_the_compilation_ends_it(self, monkeypatch):
        pools = []

        def interrupted(problem, names, pool):
            pools.append(pool)
            raise KeyboardInterrupt

        monkeypatch.setattr(measure, "prepare", interrupted)
        group = PRESETS["laptop"].group([8])
        with pytest.raises(KeyboardInterrupt):
            next(measure.measure_group(group, math.inf))
        (pool,) = pools
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(print)

    def test_an_interrupt_before_anything_is_measured(self, tmp_path, capsys, monkeypatch):
        def interrupted():
            raise KeyboardInterrupt

        monkeypatch.setattr(command, "bytes_per_second", interrupted)
        out = tmp_path / "found.json"
        with pytest.raises(SystemExit) as error:
            command.main(["--lengths", "8", "--out", str(out)])
        assert error.value.code == 130
        assert "interrupted: what was measured before is nothing" in capsys.readouterr().err
        assert not out.exists()

    def test_merges_files(self, tmp_path, capsys):
        files = [str(tmp_path / name) for name in ("a", "b", "both")]
        gpu = readme.read(readme.newest_results("gpu"))
        for name, path in zip(("x", "y"), files, strict=False):
            results.write({"groups": {name: gpu["groups"]["fa3"]}}, Path(path))
        command.main(["--merge", *files[:2], "--out", files[2], "--no-plots"])
        assert set(results.read(Path(files[2]))["groups"]) == {"x", "y"}
        assert "**y**: 16384 tokens" in capsys.readouterr().out

    def test_dry_run_lowers_for_cuda_and_says_what_cannot_be(self, capsys):
        arguments = ["--feature", "soft cap 50", "--lengths", "16", "--dry-run"]
        command.main([*arguments, "--contenders", "dense", "jax.nn xla"])
        printed = capsys.readouterr().out
        assert "b1-n8-h64-bfloat16-soft-cap-50: 2 problems, 4 programs lowered" in printed
        assert (
            "absent from backward of 2 problems: jax.nn xla: NotImplementedError: has no" in printed
        )

    def test_peak_memory_is_that_of_a_process_of_its_own(self, tmp_path, monkeypatch):
        (tmp_path / "jaxflash.py").write_text("raise ImportError('not the package measured')")
        monkeypatch.chdir(tmp_path)
        out = tmp_path / "found.json"
        arguments = ["--lengths", "512", "--heads", "1", "--no-plots", "--peak-memory"]
        command.main([*arguments, "--contenders", "jax.nn xla", "--out", str(out)])
        forward, backward, *_ = only_group(out)["rows"]
        scores = 4 * 512**2
        assert backward["memory"]["jax.nn xla"]["measured_bytes"] >= scores
        assert "measured_bytes" not in forward["memory"]["jax.nn xla"]

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--preset", "fa3", "--heads", "2"], "--preset has shapes of its own"),
            (["--heads", "4", "--kv-heads", "3"], "--kv-heads: expected a divisor of 4, got 3"),
            (["--kv-heads", "3"], "--kv-heads: expected a divisor of 8, got 3"),
            (["--heads", "0"], "--heads: expected an int, 1 or more, got '0'"),
            (["--lengths", "16", "-1"], "--lengths: expected an int, 1 or more, got '-1'"),
            (["--batch", "two"], "--batch: expected an int, 1 or more, got 'two'"),
            (["--window", "-1"], "--window: expected an int, 0 or more, got '-1'"),
            (
                ["--head-dim", "300", "--feature", "dropout 0.1"],
                "--head-dim: expected an int, from 1 to 256, got '300'",
            ),
            (["--merge", "a.json"], "--merge: expected --out"),
            (
                ["--merge", "missing.json", "--out", "x.json"],
                "--merge: expected a file of results, got missing.json: ",
            ),
        ],
    )
    def test_wrong_usage_is_named_and_exits_with_2(self, arguments, text, capsys):
        with pytest.raises(SystemExit) as error:
            command.main(arguments)
        assert text in capsys.readouterr().err
        assert error.value.code == 2

    @pytest.mark.parametrize("content", ["", "[]", '{"groups": []}', '{"groups": {"g": {}}}'])
    def test_a_file_of_something_else_is_not_overwritten(self, content, tmp_path, capsys):
        out = tmp_path / "mine.json"
        out.write_text(content)
        with pytest.raises(SystemExit) as error:
            command.main(["--heads", "1", "--lengths", "8", "--out", str(out)])
        assert error.value.code == 2
        assert f"--out: expected a file of results, got {out}: " in capsys.readouterr().err
        assert out.read_text() == content

    def test_other_shapes_have_other_groups(self, tmp_path):
        out = tmp_path / "found.json"
        arguments = ["--lengths", "8", "--no-plots", "--contenders", "dense", "--out", str(out)]
        for heads in ("1", "2"):
            command.main(["--heads", heads, *arguments])
        names = {f"b1-n{heads}-h64-float32" for heads in (1, 2)}
        assert set(results.read(out)["groups"]) == names

    @pytest.mark.parametrize("fact", ["device", "platform"])
    def test_results_of_different_devices_are_not_merged(self, fact, tmp_path, capsys):
        files = [tmp_path / "a.json", tmp_path / "b.json"]
        for value, path in zip(("this", "that"), files, strict=True):
            results.write({"groups": {"g": {"title": "t", fact: value, "rows": []}}}, path)
        out = tmp_path / "both.json"
        with pytest.raises(SystemExit) as error:
            command.main(["--merge", *map(str, files), "--out", str(out)])
        assert error.value.code == 2
        said = f"--merge: group g: expected one {fact}, got this and that"
        assert said in capsys.readouterr().err
        assert not out.exists()

    def test_without_tqdm_and_matplotlib_it_measures_all_the_same(
        self, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
        out = tmp_path / "found.json"
        command.main(["--lengths", "8", "--heads", "1", "--out", str(out)])
        assert out.exists()
        assert "pip install 'jaxflash[bench]'" in capsys.readouterr().err

    def test_torch_that_is_not_installed_is_absent(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        out = tmp_path / "torch.json"
        torch_flash.main(["--preset", "gpt2", "--lengths", "16", "--out", str(out)])
        for of_row in results.read(out)["groups"]["gpt2"]["rows"]:
            assert "import of torch halted" in of_row["absent"]["torch flash"]


@pytest.mark.parametrize("kind", readme.KINDS)
def test_readme_shows_the_newest_results(kind):
    text = readme.README.read_text()
    found = results.read(readme.newest_results(kind))
    assert readme.with_tables(text, kind, found) == text
