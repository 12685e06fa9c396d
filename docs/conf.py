"""How Sphinx builds the documentation: `sphinx-build -W docs build/docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pictures
from jaxflash import __version__

project = "jaxflash"
author = "the authors of jaxflash"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"jaxflash {release}"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["generated"]
autodoc_typehints = "none"  # types stand with the arguments' descriptions


def setup(app):
    """Draws the pictures that pages show."""
    pictures.draw_all(Path(app.srcdir) / "generated")
