"""`softmoe retrieve MODEL DATA`: the right captions for images, and the right image for captions."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from softmoe.cli.cost import parse_size
from softmoe.cli.progress import percent_on_terminal


@dataclass(frozen=True)
class Arguments:
    """Recall at 1, 5 and 10 of two towers, both ways, among all images and all captions of the data."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a saved model with two towers or of its run, or a Hub id (user/name)."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Source of images with captions: wds:PATTERN, pairs:PATH, hf:NAME, shapes."""
    split: str = "val"
    examples: int | None = None
    """Search among so many images only, chosen at random (always the same ones)."""
    image_size: str | None = None
    """Pixels, or HEIGHTxWIDTH; the size the model was saved with if not given."""
    batch_size: int = 128
    workers: int = 0
    """Processes that read images."""
    device: str = "auto"
    no_cache: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Do not keep the features in $SOFTMOE_CACHE (or ~/.cache/softmoe)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything as JSON."""
    output: Path | None = None
    """Also write everything to this JSON file."""


def main(argv: list[str]) -> int:
    a = tyro.cli(Arguments, args=argv, prog="softmoe retrieve")
    size = None if a.image_size is None else parse_size(a.image_size)

    from softmoe.evaluate import retrieve

    report = retrieve(
        a.model,
        a.data,
        split=a.split,
        examples=a.examples,
        image_size=size,
        batch_size=a.batch_size,
        workers=a.workers,
        device=a.device,
        cache=not a.no_cache,
        progress=percent_on_terminal("features"),
    )
    text = json.dumps(report, indent=2)
    if a.output:
        a.output.write_text(text + "\n")
    if a.json:
        print(text)
        return 0
    for way in ("image_to_text", "text_to_image"):
        found = dict(report[way])
        median = found.pop("median_rank")
        numbers = "   ".join(f"{name} {value:6.2%}" for name, value in found.items())
        print(f"{way.replace('_', ' '):<15}{numbers}   median rank {median:g}")
    left = f"; {report['left_out']} images were left out" if report["left_out"] else ""
    print(f"{report['images']:,} images with {report['captions']:,} captions{left}")
    return 0
