"""Experiments that train several runs and compare them: the quickstart, and the paper's studies in `catalog`."""

import difflib
import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """List the studies of the paper."""
    from softmoe.studies import catalog

    return sorted(module.name for module in pkgutil.iter_modules(catalog.__path__))


def find(name: str) -> ModuleType:
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no study {name!r}{hint} Studies: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.catalog.{name}")
