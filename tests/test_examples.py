"""The short examples run, and say what they show."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = ("alibi", "packing", "pair_bias", "sliding_window", "vmap_heads")


@pytest.mark.parametrize("name", SHORT)
def test_runs(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.count("\n") > 2
