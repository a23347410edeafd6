"""The page that follows one command through the code names files and functions that are there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data_flow.md").read_text("utf-8")


def defined(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if hasattr(node, "name")}


def test_every_file_exists() -> None:
    """Each path of the page, written from the package's folder, is a file there."""
    named = set(re.findall(r"\b(?:[a-z_]+/)+[a-z_]+\.py\b", PAGE))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / "softmoe" / name).is_file()] == []


def test_every_function_is_in_its_file() -> None:
    """A line `file  function, function` of the walk names what the file defines, and so does `function (file)`."""
    walk = PAGE[PAGE.index("## One command") :]
    lines = re.findall(r"^ +([a-z_]+/[a-z_]+\.py) +(\w+(?:\.\w+)?(?:, \w+)*)(?:  |$)", walk, re.MULTILINE)
    headings = re.findall(r"^    (?! )[^/]*?(\w+)[ (,]+([a-z_]+/[a-z_]+\.py)\)$", walk, re.MULTILINE)
    lines += [(file, name) for name, file in headings]
    assert len(lines) > 15
    for file, names in lines:
        for name in names.replace(".", ", ").split(", "):
            assert name in defined(ROOT / "softmoe" / file), (file, name)
