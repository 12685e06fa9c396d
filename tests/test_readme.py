"""The README's code runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_example(code):
    exec(compile(code, "README.md", "exec"), {})
