"""`softmoe predict MODEL IMAGES...`: the likeliest classes of images in files."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from softmoe.cli.cost import parse_size

if TYPE_CHECKING:
    from softmoe.evaluate import Prediction


@dataclass(frozen=True)
class Arguments:
    """The likeliest classes of images. Exit code 1 if some could not be read; they are named."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a saved model or of a run, or a Hub id (user/name)."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE")]
    """Image files, folders (with all below them) and patterns."""
    top: int = 5
    """Classes for each image."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print as JSON."""
    features: Path | None = None
    """Write the vectors before the head to this .npy file, one row for each readable image, in the order printed."""
    image_size: str | None = None
    """Pixels, or HEIGHTxWIDTH; the size the model was saved with if not given."""
    batch_size: int = 64
    workers: int = 0
    """Processes that read images."""
    device: str = "auto"
    weights: Literal["float32", "float16", "bfloat16", "int8", "int8_dynamic", "mapped"] | None = None
    """Prepare the model for fast inference, with its experts stored so; mapped: for models larger than the memory."""


def main(argv: list[str]) -> int:
    a = tyro.cli(Arguments, args=argv, prog="softmoe predict")
    size = None if a.image_size is None else parse_size(a.image_size)
    if a.features and not a.features.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {a.features.resolve().parent} to write {a.features.name} into")

    from softmoe.evaluate import predict

    predictions, unreadable = predict(
        a.model,
        a.images,
        top=a.top,
        image_size=size,
        batch_size=a.batch_size,
        workers=a.workers,
        device=a.device,
        weights=a.weights,
    )
    if a.json:
        bad = [{"image": image.name, "reason": image.reason} for image in unreadable]
        print(json.dumps({"predictions": [p.to_dict() for p in predictions], "unreadable": bad}, indent=2))
    else:
        for prediction in predictions:
            print(line(prediction))
    if a.features:
        save_features(a.features, predictions)
    for image in unreadable:
        print(f"softmoe: unreadable: {image.name}: {image.reason}", file=sys.stderr)
    return 1 if unreadable else 0


def line(prediction: "Prediction") -> str:
    classes = ", ".join(f"{name} {probability:.1%}" for name, probability in prediction.top)
    return f"{prediction.name}: {classes or f'{len(prediction.features)} features'}"


def save_features(path: Path, predictions: "list[Prediction]") -> None:
    import numpy as np

    if not predictions:
        raise ValueError(f"{path} was not written: none of the images could be read")
    with path.open("wb") as file:  # np.save would add .npy to another name
        np.save(file, np.stack([p.features for p in predictions]))
