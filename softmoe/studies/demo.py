"""Show the small model that comes with the package: pictures, what it takes them for, and what is inside it."""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from softmoe.data import open_source
from softmoe.evaluate import load, predict
from softmoe.evaluate.inputs import random_subset
from softmoe.inspection.inspect import inspect_source
from softmoe.inspection.page import write_page

DATA = "shapes?size=48"
EXAMPLES = 64  # pictures for the statistics of the page


@dataclass(frozen=True)
class Shown:
    """A picture the model was not trained on, what it shows, and what the model takes it for."""

    path: Path
    shows: str
    taken_for: str
    probability: float


def run_demo(folder: Path, pictures: int = 8) -> tuple[list[Shown], Path]:
    """Draw `pictures` into the folder, predict them, and write the inspection page; returns both."""
    if pictures < 1:
        raise ValueError(f"the number of pictures must be at least 1, got {pictures}")
    loaded = load("demo", device="cpu")
    source = random_subset(open_source(DATA, "val"), pictures, seed=1)
    truth: dict[Path, str] = {}
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for index in range(len(source)):
        example = source[index]
        path = folder / "pictures" / f"{index + 1}.png"
        Image.fromarray(example.image).save(path)
        truth[path] = source.classes[example.labels[0]]
    predictions, _ = predict("demo", list(truth), device="cpu")
    shown = [Shown(Path(p.name), truth[Path(p.name)], *p.top[0]) for p in predictions]
    statistics = random_subset(open_source(DATA, "val"), EXAMPLES)
    inside = inspect_source(
        loaded.model, statistics, loaded.transform, name="demo", images=pictures, classes=loaded.class_names()
    )
    lead = f"{inside.images} pictures of {DATA} that it was not trained on."
    return shown, write_page([inside], folder / "inspect.html", title="Inside the demo model", lead=lead)
