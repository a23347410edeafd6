"""What Linux, macOS and Windows must all find: no module of one system at the top of a file, no encoding by chance."""

import ast
from pathlib import Path

import pytest

import softmoe

ROOT = Path(softmoe.__file__).parent
UNIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "pty"}
SERVICE = {"inference/serving.py", "data/decoders.py"}  # `softmoe serve` says that it needs Linux or macOS
TEXT_MODES = {"r", "w", "a", "x", "r+", "w+", "a+"}


def trees(source: str | None = None) -> list[tuple[str, ast.Module]]:
    if source is not None:
        return [("given", ast.parse(source))]
    return [(p.relative_to(ROOT).as_posix(), ast.parse(p.read_text(encoding="utf-8"))) for p in ROOT.rglob("*.py")]


def unix_imports(tree: ast.Module) -> set[str]:
    """Modules of Unix that are imported as the file is."""
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    return UNIX_ONLY & (names | {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)})


def encodings_by_chance(tree: ast.Module) -> list[int]:
    """Lines that read or write text in whatever encoding the system has."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
        method = isinstance(node.func, ast.Attribute)
        whole = method and name in ("read_text", "write_text") and "utf-8" not in modes
        if whole or (name == "open" and modes & TEXT_MODES):
            lines.append(node.lineno)
    return lines


def test_no_module_of_one_system():
    """Files can be imported everywhere; what needs a Unix module asks for it where it is used."""
    assert {name for name, tree in trees() if unix_imports(tree)} == SERVICE


def test_text_has_an_encoding():
    """Windows reads and writes text in a code page unless it is told otherwise."""
    assert {name: lines for name, tree in trees() if (lines := encodings_by_chance(tree))} == {}


@pytest.mark.parametrize(
    ("source", "unix", "lines"),
    [
        ("import fcntl", {"fcntl"}, []),
        ("from resource import getrlimit", {"resource"}, []),
        ("def f():\n    import fcntl", set(), []),
        ("path.read_text()\nopen(path, 'w')\npath.open('a')", set(), [1, 2, 3]),
        (
            "path.read_text(encoding='utf-8')\npath.read_text('utf-8')\nopen(path, 'rb')\nwrite_text(path, 'x')",
            set(),
            [],
        ),
    ],
)
def test_these_checks_can_fail(source: str, unix: set[str], lines: list[int]):
    """The two checks above see what they look for."""
    ((_, tree),) = trees(source)
    assert unix_imports(tree) == unix
    assert encodings_by_chance(tree) == lines
