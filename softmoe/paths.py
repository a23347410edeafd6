"""Paths that a user names, places for what a command writes, and the folder of the cache."""

import getpass
import itertools
import os
import tempfile
from pathlib import Path


def home_path(path: str | Path) -> Path:
    """Return a path with `~` replaced by the home folder of a user, or as it is if there is no such user."""
    return Path(os.path.expanduser(path))


def unused_path(path: Path) -> Path:
    """Return the path or, if something is there, the same with a number: evaluation_2.html."""
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


def check_new(path: str | Path | None, option: str, *, a_file: bool = True) -> None:
    """Raise ValueError for a file or a folder with anything in it that is there already, or that cannot be made.

    With `a_file` an empty folder is refused too; without, the command writes into it.
    """
    if path is None:
        return
    path = Path(path)
    if path.is_file():
        raise ValueError(f"{path} is there already: choose another {option}, or remove it")
    if path.is_dir() and a_file:
        raise ValueError(f"{option} {path} is a folder; give the name of a new file")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is there already: choose another {option}, a new or an empty folder")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if there != path and not can_write(there):
        why = "cannot be written to" if there.is_dir() else "is a file"
        raise ValueError(f"{option} {path} cannot be made: {there} {why}; choose another place")


def can_write(folder: Path) -> bool:
    """Tell if files can be made in a folder, by making a temporary one: permissions alone do not tell."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def cache_folder() -> Path:
    """Return the folder for files that can be made again: $SOFTMOE_CACHE, or ~/.cache/softmoe.

    A user without a home has a folder of their own among the temporary ones.
    """
    if wanted := os.environ.get("SOFTMOE_CACHE"):
        return Path(wanted)
    try:
        return Path.home() / ".cache" / "softmoe"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"softmoe-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"
