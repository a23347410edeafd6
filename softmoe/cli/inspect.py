"""`softmoe inspect MODEL DATA`: what the routers of a model do, as figures, numbers and a page."""

import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from softmoe.cli.parse import parse, percent_on_terminal

if TYPE_CHECKING:
    from softmoe.inspection import Inspection


@dataclass(frozen=True)
class Arguments:
    """Look inside a model: write figures, inspect.json and inspect.html."""

    model: str
    """Folder of a saved model or of a run, or a Hub id (user/name)."""
    data: str
    """Source of images: a folder with SPLIT/CLASS/IMAGE, or shapes, wds:PATTERN, hf:NAME, idx:PATH, digits."""
    _: KW_ONLY
    split: str = "val"
    images: int = 16
    """Images to show in full on the page."""
    examples: int | None = 1024
    """Images for the statistics, chosen at random (always the same ones); None is all."""
    compare: str | None = None
    """A second model, to stand beside the first."""
    out: Path | None = None
    """Folder to write into; the run's own if MODEL is one, else ./inspect."""
    image_size: int | tuple[int, int] | None = None
    """Pixels, or HEIGHTxWIDTH; the size each model was saved with if not given."""
    batch_size: int = 32
    workers: int = 0
    """Processes that read images."""
    device: str = "auto"


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "inspect")

    from softmoe.inspection import plots
    from softmoe.inspection.inspect import write_inspection
    from softmoe.inspection.page import NOTES, layers_text

    names = [a.model, *([a.compare] if a.compare else [])]
    models = [look(a, name) for name in names]
    title = f"Inside {' and '.join(model.name for model in models)}"
    written = write_inspection(models, out_folder(a), title=title, about={"data": a.data, "split": a.split})
    for model in models:
        print(f"{model.name}: {model.images:,} images\n{layers_text(model)}\n")
    print("\n".join(f"{columns}: {meaning}" for columns, meaning in NOTES) + "\n")
    if not plots.available():
        print("softmoe: no figures were drawn, they need matplotlib: pip install softmoe-vit[plots]", file=sys.stderr)
    for path in written:
        if path.suffix != ".svg":
            print(path)
    return 0


def look(a: Arguments, name: str) -> "Inspection":
    from softmoe.data import open_source
    from softmoe.evaluate import load
    from softmoe.evaluate.inputs import random_subset
    from softmoe.inspection.inspect import inspect_source

    loaded = load(name, device=a.device, image_size=a.image_size)
    source = random_subset(open_source(a.data, a.split), a.examples)
    classes = loaded.saved.classes or (source.classes if len(source.classes) == loaded.model.config.num_classes else ())
    return inspect_source(
        loaded.model,
        source,
        loaded.transform,
        name=Path(name).name or name,
        images=a.images,
        batch_size=a.batch_size,
        workers=a.workers,
        classes=classes,
        about={"model": name, "fingerprint": loaded.saved.fingerprint, "data_fingerprint": source.fingerprint},
        progress=percent_on_terminal("inspecting"),
    )


def out_folder(a: Arguments) -> Path:
    run = Path(a.model)
    return a.out or (run if (run / "metrics.jsonl").is_file() else Path("inspect"))
