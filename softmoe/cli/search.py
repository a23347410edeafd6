"""`softmoe search MODEL "a red car" FOLDER`: the images that a sentence describes best, as a page."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from softmoe.cli.progress import percent_on_terminal


@dataclass(frozen=True)
class Arguments:
    """Find images by a sentence, and write a page with thumbnails."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a saved model with two towers or of its run, or a Hub id (user/name)."""
    query: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folders (with all below them), image files and patterns."""
    top: int = 24
    """Images to show."""
    out: Path = Path("search.html")
    """Where the page goes."""
    batch_size: int = 64
    workers: int = 0
    """Processes that read images."""
    device: str = "auto"
    no_cache: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Do not keep the features in $SOFTMOE_CACHE (or ~/.cache/softmoe)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the result as JSON and write no page."""


def main(argv: list[str]) -> int:
    a = tyro.cli(Arguments, args=argv, prog="softmoe search")

    from softmoe.evaluate.search import search, write_page

    found = search(
        a.model,
        a.query,
        a.images,
        top=a.top,
        batch_size=a.batch_size,
        workers=a.workers,
        device=a.device,
        cache=not a.no_cache,
        progress=percent_on_terminal("features"),
    )
    if a.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    for hit in found.hits[:10]:
        print(f"{hit.score:6.3f}  {hit.path}")
    print(write_page(found, a.out))
    if found.unreadable:
        print(f"softmoe: {found.unreadable} files could not be read", file=sys.stderr)
    return 0
