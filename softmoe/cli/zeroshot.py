"""`softmoe zeroshot MODEL DATA`: classes told apart by their names alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from softmoe.cli.cost import parse_size
from softmoe.cli.progress import percent_on_terminal


@dataclass(frozen=True)
class Arguments:
    """Accuracy of two towers that know the classes by name only."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a saved model with two towers or of its run, or a Hub id (user/name)."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Source of images with classes: a folder with SPLIT/CLASS/IMAGE, or shapes, wds:PATTERN, hf:NAME."""
    split: str = "val"
    classes: Path | None = None
    """JSON with names for the classes: a list in the order of the labels, or an object by the data's names."""
    templates: tuple[str, ...] | None = None
    """Sentences with {} where the name goes, or one .txt file with one a line."""
    examples: int | None = None
    """Evaluate on so many images only, chosen at random (always the same ones)."""
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
    a = tyro.cli(Arguments, args=argv, prog="softmoe zeroshot")
    size = None if a.image_size is None else parse_size(a.image_size)

    from softmoe.evaluate import zeroshot

    report = zeroshot(
        a.model,
        a.data,
        split=a.split,
        classes=a.classes,
        templates=None if a.templates is None else read_templates(a.templates),
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
    numbers = "   ".join(f"{name} {value:.2%}" for name, value in report["numbers"].items())
    print(f"{numbers}   (chance {report['chance']:.2%})")
    print(f"{report['images']:,} images, {len(report['classes'])} classes, {len(report['templates'])} templates")
    return 0


def read_templates(given: tuple[str, ...]) -> list[str]:
    """As given, or the lines of a file."""
    if len(given) != 1 or not given[0].endswith(".txt"):
        return list(given)
    return [line.strip() for line in Path(given[0]).read_text(encoding="utf-8").splitlines() if line.strip()]
