"""The short examples compute what they say, and the training ones a loss of every row."""

import ast
import importlib
import runpy
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def results_of(name):
    """What an example checks of itself."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize(("option", "status"), [("--help", 0), ("--no-such-option", 2)])
def test_command_lines_are_read(path, option, status, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [str(path), option, "a-folder"])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(path), run_name="__main__")
    assert error.value.code == status
    printed = capsys.readouterr()
    if status == 0:
        assert ast.get_docstring(ast.parse(path.read_text())).splitlines()[0] in printed.out
    else:
        assert "unrecognized arguments: --no-such-option" in printed.err


def test_rows_without_a_target_have_no_loss(monkeypatch):
    """Bytes that begin a document are no targets, and rows of one byte may hold no other."""
    monkeypatch.syspath_prepend(EXAMPLES)
    training = importlib.import_module("common.training")
    model = importlib.import_module("common.model").LanguageModel(
        init=lambda key: {},
        apply=lambda params, tokens, *_: jnp.zeros((*tokens.shape, 256)),
        dtype="float32",
        dealt_axes={},
    )
    start, letter = np.uint8([[7, 0]]), np.uint8([[7, 7]])
    assert training.mean_loss(model, {}, start) == 0
    for batches in ([letter, letter], [start, letter]):
        loss = training.evaluate(model, {}, np.stack(batches))
        np.testing.assert_allclose(loss, np.log(256), rtol=1e-6)


def test_alibi_learns_the_slopes():
    found = results_of("alibi")
    # Steps shrink to 2.5e-4 of a slope, and the sum of the last ten is 0.014.
    assert found["slopes"] < 0.01
    assert found["loss"] < 1e-5  # from 5e-2


def test_packing_gives_documents_what_they_have_alone():
    found = results_of("packing")
    # Outputs are means of normal numbers, some of few: float32 rounds 1 to 1e-7, sums to a few.
    assert found["padded"] < 5e-6
    assert found["packed"] < 5e-6
    assert found["past a length"] == 0


def test_pair_bias_is_the_formula():
    found = results_of("pair_bias")
    assert found.pop("absent residues") == 0
    assert set(found) == {"loss", "parameters", "single", "pair"}
    # Float32's 1e-7, and what a chain of four products and a softmax make of it.
    assert max(found.values()) < 5e-6


def test_sliding_window_finds_what_its_window_holds():
    losses = results_of("sliding_window")
    # Tokens are random: who does not see the one 12 steps back can't go below log(16) = 2.8.
    assert losses[0] > 2.5
    assert losses[-1] < 0.1


def test_vmap_heads_is_attention_of_many_heads():
    found = results_of("vmap_heads")
    assert found["mapped"] < 5e-6
    assert found["shared"] < 5e-6
    # Scales to 2 make logits of 50, whose rounding of 4e-6 the exponential passes on to outputs.
    assert found["scales"] < 1e-4
    assert found["calls"] == 1
