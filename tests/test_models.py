"""The models of docs/models.md, as they stand there, before and after what the page says."""

import importlib
import re
from pathlib import Path

import jax
import numpy as np
import pytest

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
WRAPPERS = {
    "Flax": "jaxflash.flax",
    "Equinox": "jaxflash.equinox",
    "Plain JAX": "jaxflash._dot_product_attention",
}


def section(title):
    """The model of a section of the page, and its diffs."""
    text = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S).group(1)
    blocks = re.findall(r"^```(python|diff)\n(.*?)^```$", text, re.M | re.S)
    model, *_ = (code for kind, code in blocks if kind == "python" and ">>>" not in code)
    return model, [code for kind, code in blocks if kind == "diff"]


def applied(diff, code):
    """The code with the lines of a diff replaced, which it must have once."""

    def side(marks):
        lines = diff.splitlines(keepends=True)
        return "".join(line[1:] for line in lines if line[0] in marks)

    assert code.count(side(" -")) == 1, diff
    return code.replace(side(" -"), side(" +"))


def results(code, title):
    """The loss and the gradients that a model computes, by place."""
    names = {"__name__": title}
    exec(compile(code, f"{PAGE.name}: {title}", "exec"), names)
    leaves = jax.tree.leaves((names["value"], names["gradients"]))
    return [np.asarray(leaf) for leaf in leaves]


@pytest.mark.parametrize("title", WRAPPERS)
def test_diff_changes_attention_and_nothing_else(title, monkeypatch):
    wrapper = importlib.import_module(WRAPPERS[title])
    calls = []

    def counted(*arrays, attention=wrapper.flash_attention, **options):
        calls.append(1)
        return attention(*arrays, **options)

    monkeypatch.setattr(wrapper, "flash_attention", counted)
    code, diffs = section(title)
    value, *gradients = results(code, title)
    assert not calls
    for diff in diffs:
        code = applied(diff, code)
    new_value, *new_gradients = results(code, title)
    assert calls
    np.testing.assert_allclose(new_value, value, rtol=1e-6)
    assert len(gradients) >= 4
    for new, old in zip(new_gradients, gradients, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-6)
