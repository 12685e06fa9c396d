"""The examples in the documentation do what it says, and the reference has every public name."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import jaxflash

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if ">>>" in page.read_text()]
COMMANDS = ["bench"]  # modules without an interface in Python
MODULES = [
    "jaxflash",
    *(
        f"jaxflash.{module.name}"
        for module in pkgutil.iter_modules(jaxflash.__path__)
        if not module.name.startswith("_") and module.name not in COMMANDS
    ),
]
PUBLIC = [
    f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples(page):
    result = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", [*PUBLIC, *(f"jaxflash.{command}" for command in COMMANDS)])
def test_reference_has_every_public_name(name):
    assert name in (DOCS / "api.md").read_text().replace("`", " ").split()


def documented_callables():
    """Public functions, and the methods that the reference shows of public classes."""
    for path in PUBLIC:
        module, name = path.rsplit(".", 1)
        public = getattr(importlib.import_module(module), name)
        if inspect.isclass(public):
            yield from ((f"{path}.{m}", getattr(public, m)) for m in ("__init__", "__call__"))
        elif callable(public):
            yield path, public


@pytest.mark.parametrize(("name", "function"), list(documented_callables()))
def test_every_argument_is_described(name, function):
    described = inspect.getdoc(function).partition("\nArgs:\n")[2]
    for argument in inspect.signature(function).parameters:
        found = re.search(rf"[ *]{argument}[:,]", described)
        assert found or argument == "self", f"{name}: {argument}"
    assert "Raises:" in described, name
