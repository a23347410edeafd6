"""Sphinx builds the site from this folder: `make docs`. A warning, such as a link that leads nowhere, is an error."""

import importlib
import json
import sys
from pathlib import Path

from myst_parser.parsers.sphinx_ import MystParser

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import softmoe  # noqa: E402

for page in sorted((ROOT / "docs" / "api").glob("*.md")):  # names that are loaded when first used are documented too
    if (ROOT / "softmoe" / page.stem).is_dir():
        room = importlib.import_module(f"softmoe.{page.stem}")
        vars(room).update({name: getattr(room, name) for name in room.__all__})

project = "softmoe"
author = "the authors of softmoe"
release = version = softmoe.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
nitpicky = False  # types of torch are named without a link

html_theme = "furo"
html_title = "softmoe"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"source_repository": "", "navigation_with_keys": True}

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["misc.highlighting_failure"]
highlight_language = "text"

default_role = "literal"  # docstrings write `names` as Markdown does
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # torch writes its own in another form
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}


class NotebookParser(MystParser):
    """Reads a notebook as the Markdown it would be: text cells as they are, code cells as blocks."""

    supported = ("ipynb",)

    def parse(self, inputstring, document):
        parts = []
        for cell in json.loads(inputstring)["cells"]:
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        super().parse("\n\n".join(parts), document)


def read_plainly(app, what, name, obj, options, lines):
    """Docstrings are plain text: an indented part is shown as it stands, and bars mean themselves."""
    plain, before = [], ""
    for line in lines:
        if line.startswith("    ") and not before.startswith("    "):
            plain += ["::", ""]
        plain.append(line if line.startswith("    ") else line.replace("|", r"\|"))
        before = line or before
    lines[:] = plain


def setup(app):
    app.connect("autodoc-process-docstring", read_plainly)
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
