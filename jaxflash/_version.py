"""The version of the package, of which pyproject.toml has the one copy."""

import tomllib
from importlib import metadata
from pathlib import Path


def _read() -> str:
    try:
        return metadata.version("jaxflash")
    except metadata.PackageNotFoundError:  # Imported from its source folder.
        project = Path(__file__).parent.parent / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["version"]


__version__ = _read()
