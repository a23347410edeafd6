"""Load the names of a package when they are first used, so that whoever needs few of them waits for little."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a `__getattr__` for a package that loads its names when they are first used, and a `__dir__` with them.

    `homes` has the names by the module they are in, a file of the package or the full name of another module.
    """

    def load(name: str) -> Any:
        for home, names in homes.items():
            if name in names:
                return getattr(import_module(home if "." in home else f"{package}.{home}"), name)
        if name in homes:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *(name for names in homes.values() for name in names)})

    return load, names
