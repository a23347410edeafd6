"""A sentence and a folder of images -> the images it describes best, as a list and as a page with thumbnails."""

import base64
import glob
import io
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from softmoe import __version__
from softmoe.data import BrokenImage
from softmoe.data.source import fingerprint
from softmoe.data.texts import normal_text
from softmoe.evaluate.api import Names, OverFeatures, as_list, function
from softmoe.evaluate.features import Progress
from softmoe.evaluate.inputs import FileSource, find_images
from softmoe.evaluate.towers import load_towers

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


class FilesAsTheyAre(FileSource):
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


@dataclass(frozen=True)
class Search(OverFeatures):
    """Find images by a sentence.

    The first search of a folder computes its features; later ones, for any text, read them from the cache.
    """

    model: str | Path
    """Folder of a saved model with two towers or of its run, or a Hub id (user/name)."""
    query: str
    """The sentence, in quotes."""
    images: Names
    """Folders (with all below them), image files and patterns."""
    _: KW_ONLY
    top: int = 24
    """Images to show."""
    batch_size: int = 64

    def run(self, progress: Progress | None = None) -> Hits:
        """The `top` images that are nearest to the text; equal ones in order of name."""
        if not normal_text(self.query):
            raise ValueError("the text to search for is empty")
        if self.top < 1:
            raise ValueError(f"top must be at least 1, got {self.top}")
        names = as_list(self.images)
        for name in names:
            if not os.path.lexists(Path(name).expanduser()) and not glob.has_magic(name):
                raise ValueError(
                    f"there is no image file or folder {name!r}; the text to search for is one argument, in quotes"
                )
        source = FilesAsTheyAre(find_images(names))
        towers = load_towers(self.model, device=self.device, image_size=self.image_size)
        image_nE, features = towers.embed_images(source, **self.feature_options(progress))
        score_n = image_nE @ towers.embed_texts([self.query])[0]
        order = score_n.argsort(descending=True, stable=True)[: self.top].tolist()
        hits = tuple(Hit(source.paths[int(features.indices[row])], float(score_n[row])) for row in order)
        return Hits(self.query, hits, len(image_nE), len(source) - len(image_nE))


search = function(Search)


def write_page(found: Hits, path: Path) -> Path:
    """Write one file that opens from disk. Names and the text may be anybody's: they are escaped."""
    page = jinja2.Environment(autoescape=True).from_string(
        files("softmoe.evaluate").joinpath("search.html").read_text(encoding="utf-8")
    )
    shown = [
        {
            "name": hit.path.name,
            "address": hit.path.as_uri(),
            "score": f"{hit.score:.3f}",
            "picture": thumbnail(hit.path),
        }
        for hit in found.hits
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = page.render(query=found.query, images=found.images, hits=shown, version=__version__)
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def thumbnail(path: Path) -> str:
    """A small JPEG as a data address; empty if the file went away meanwhile."""
    try:
        pixels = FileSource([path]).read(0, THUMBNAIL).image
    except BrokenImage:
        return ""
    picture = Image.fromarray(pixels)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
