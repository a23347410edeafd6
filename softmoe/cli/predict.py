"""`softmoe predict MODEL IMAGES...`: the likeliest classes of images in files."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from softmoe.cli.parse import parse
from softmoe.evaluate import Predict, Prediction


@dataclass(frozen=True, kw_only=True)
class Arguments(Predict):
    """The likeliest classes of images. Exit code 1 if some could not be read; they are named."""

    json: bool = False
    """Print as JSON."""
    features: Path | None = None
    """Write the vectors before the head to this .npy file, one row for each readable image, in the order printed."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "predict")
    if a.features and not a.features.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {a.features.resolve().parent} to write {a.features.name} into")
    predictions, unreadable = a.run()
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


def line(prediction: Prediction) -> str:
    classes = ", ".join(f"{name} {probability:.1%}" for name, probability in prediction.top)
    return f"{prediction.name}: {classes or f'{len(prediction.features)} features'}"


def save_features(path: Path, predictions: list[Prediction]) -> None:
    if not predictions:
        raise ValueError(f"{path} was not written: none of the images could be read")
    with path.open("wb") as file:  # np.save would add .npy to another name
        np.save(file, np.stack([p.features for p in predictions]))
