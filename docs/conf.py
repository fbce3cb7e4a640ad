"""How Sphinx builds out/docs (`make docs`): the pages of this folder, and the reference of the package's docstrings."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from sphinx.application import Sphinx

import vitdeploy.runtime

sys.path.insert(0, str(Path(__file__).parent))
from tables import fill

# Some public names are loaded on first access; autodoc describes only loaded ones.
for module in (vitdeploy, vitdeploy.runtime):
    for public in getattr(module, "__all__", ()):
        setattr(module, public, getattr(module, public))

project = "vitdeploy"
release = version = vitdeploy.__version__
html_title = f"vitdeploy {release}"
html_theme = "furo"
html_show_copyright = html_show_sphinx = html_copy_source = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py", "tables.py"]
# Titles are links, as on the pages of a code host: performance.md#tried.
myst_heading_anchors = 4

# Docstrings write code in single backticks.
default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def to_restructured_text(
    app: Sphinx, what: str, name: str, described: object, options: object, lines: list[str]
) -> None:
    """Docstrings are plain text: a list follows its sentence at once, and a drawing keeps its lines."""
    text = re.sub(r"^(?!- | )(.+)\n(?=- )", r"\1\n\n", "\n".join(lines), flags=re.MULTILINE)
    parts = [f"::\n\n{textwrap.indent(part, '    ')}" if "├──" in part else part for part in text.split("\n\n")]
    lines[:] = "\n\n".join(parts).split("\n")


def setup(app: Sphinx) -> None:
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", to_restructured_text)
