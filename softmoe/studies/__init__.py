"""Experiments that train several runs and compare them: the quickstart, and the paper's studies in `catalog`."""

import ast
import difflib
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType


def names() -> list[str]:
    """List the studies of the paper."""
    from softmoe.studies import catalog

    return sorted(module.name for module in pkgutil.iter_modules(catalog.__path__))


def about(name: str) -> str:
    """Return the question of a study, from its docstring, which is read and not run."""
    from softmoe.studies import catalog

    text = Path(catalog.__path__[0], f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0]


def find(name: str) -> ModuleType:
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no study {name!r}{hint} Studies: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.catalog.{name}")
