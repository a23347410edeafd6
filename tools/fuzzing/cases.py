"""What every kind of input is made of: cases, sets of them, and the good pictures and folders that are damaged.

A set builds its good inputs once (`prepare`), makes the input number i from a generator seeded by (seed, set, i)
(`make`), and runs it (`run`). `run` returns "right", or raises: ValueError and OSError with one line are the sentence
that a user gets, `Wrong` is a result that should not have been given, everything else is a defect.
"""

import fcntl
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Files = dict[str, bytes]


class Wrong(Exception):
    """A result that should have been an error: something was loaded other than what was saved."""


@dataclass
class Case:
    """One input: files by their names, and what is done with them."""

    files: Files
    call: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return folder


@dataclass
class Set:
    """One kind of input. `seconds` and `megabytes` (above what the process had before) bound what an input may cost."""

    prepare: Callable[[Path], Any]
    make: Callable[[random.Random, Any], Case]
    run: Callable[[Case, Path, Any], str]
    seconds: float = 20.0
    megabytes: int = 500


def tree(folder: Path) -> Files:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def built(folder: Path, name: str, build: Callable[[Path], None]) -> Path:
    """A folder that several processes need: the first builds it, the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = folder / f".{name}.partial"
            build(partial)
            partial.rename(target)
    return target


def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (4, 3, 4, 3), dtype=np.uint8)
    return [np.asarray(Image.fromarray(c).resize((40, 30), Image.Resampling.BICUBIC)) for c in coarse]


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()
