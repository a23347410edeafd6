"""A sentence and a folder of images -> the images it describes best, as a list and as a page with thumbnails."""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softmoe.data import BrokenImage
from softmoe.data.source import fingerprint
from softmoe.data.texts import normal_text
from softmoe.evaluate.api import Search, as_list
from softmoe.evaluate.features import Progress
from softmoe.evaluate.inputs import FileSource, find_images
from softmoe.evaluate.towers import load_towers
from softmoe.paths import home_path
from softmoe.storage.files import write_text
from softmoe.storage.pages import render, thumbnail

THUMBNAIL = 224


@dataclass(frozen=True)
class Hit:
    path: Path
    score: float
    """Cosine of the angle between the text and the image, at most 1."""


@dataclass(frozen=True)
class Hits:
    query: str
    hits: tuple[Hit, ...]
    images: int
    """The number of images that were searched."""
    unreadable: int

    def to_dict(self) -> dict[str, Any]:
        found = [{"image": str(hit.path), "score": hit.score} for hit in self.hits]
        return {"query": self.query, "images": self.images, "unreadable": self.unreadable, "hits": found}


class FilesByStat(FileSource):
    """Image files, known by name, size and time: a changed file is another one, so its features are computed anew."""

    def __init__(self, paths: Sequence[Path]):
        super().__init__([Path(os.path.abspath(path)) for path in paths])
        self.fingerprint = fingerprint("search", *(os.fsencode(fact) for fact in map(_facts, self.paths)))


def _facts(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:  # a dangling link
        return str(path)
    return f"{path}\0{status.st_size}\0{status.st_mtime_ns}"


def run_search(options: Search, progress: Progress | None = None) -> Hits:
    """Return the `top` images that are nearest to the text; equal ones in order of name."""
    if not normal_text(options.query):
        raise ValueError("the text to search for is empty")
    if options.top < 1:
        raise ValueError(f"top must be at least 1, got {options.top}")
    names = as_list(options.images)
    for name in names:
        if not os.path.lexists(home_path(name)) and not glob.has_magic(name):
            raise ValueError(
                f"there is no image file or folder {name!r}; the text to search for is one argument, in quotes"
            )
    source = FilesByStat(find_images(names))
    towers = load_towers(options.model, **options.model_options)
    image_nE, features = towers.embed_images(source, **options.feature_options(progress))
    score_n = image_nE @ towers.embed_texts([options.query])[0]
    order = score_n.argsort(descending=True, stable=True)[: options.top].tolist()
    hits = tuple(Hit(source.paths[int(features.indices[row])], float(score_n[row])) for row in order)
    return Hits(options.query, hits, len(image_nE), len(source) - len(image_nE))


def write_page(found: Hits, path: Path) -> Path:
    """Write one file that opens from disk."""
    shown = [
        {
            "name": hit.path.name,
            "address": hit.path.as_uri(),
            "score": f"{hit.score:.3f}",
            "picture": picture_of(hit.path),
        }
        for hit in found.hits
    ]
    text = render("softmoe.evaluate", "search.html", query=found.query, images=found.images, hits=shown)
    return write_text(path, text)


def picture_of(path: Path) -> str:
    """Return a small JPEG as a data address; empty if the file went away meanwhile."""
    try:
        return thumbnail(FileSource([path]).read(0, THUMBNAIL).image, THUMBNAIL)
    except BrokenImage:
        return ""
