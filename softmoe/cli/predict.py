"""`softmoe predict MODEL IMAGES...`: the likeliest classes of images in files."""

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from softmoe.cli.parse import check_new, parse
from softmoe.evaluate import Predict

if TYPE_CHECKING:
    from softmoe.evaluate import Prediction


@dataclass(frozen=True, kw_only=True)
class Arguments(Predict):
    """The likeliest classes of images. Exit code 1 if some could not be read; they are named."""

    json: bool = False
    """Print as JSON."""
    csv: Path | None = None
    """Also write a table to this new file: a row for each image, with its classes and their probabilities."""
    features: Path | None = None
    """Write the vectors before the head to this .npy file, one row for each readable image, in the order printed."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "predict")
    if a.features and not a.features.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {a.features.resolve().parent} to write {a.features.name} into")
    check_new(a.csv)
    predictions, unreadable = a.run()
    if a.json:
        bad = [{"image": image.name, "reason": image.reason} for image in unreadable]
        print(json.dumps({"predictions": [p.to_dict() for p in predictions], "unreadable": bad}, indent=2))
    else:
        for prediction in predictions:
            print(line(prediction))
    if a.csv:
        save_table(a.csv, predictions)
    if a.features:
        save_features(a.features, predictions)
    for image in unreadable:
        print(f"softmoe: unreadable: {image.name}: {image.reason}", file=sys.stderr)
    return 1 if unreadable else 0


def line(prediction: "Prediction") -> str:
    classes = ", ".join(f"{name} {probability:.1%}" for name, probability in prediction.top)
    return f"{prediction.name}: {classes or f'{len(prediction.features)} features'}"


def save_features(path: Path, predictions: "list[Prediction]") -> None:
    if not predictions:
        raise ValueError(f"{path} was not written: none of the images could be read")
    import numpy as np

    with path.open("wb") as file:  # np.save would add .npy to another name
        np.save(file, np.stack([p.features for p in predictions]))


def save_table(path: Path, predictions: "list[Prediction]") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    places = range(1, 1 + max((len(p.top) for p in predictions), default=0))
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        rows = csv.writer(file)
        rows.writerow(["image", *(word for n in places for word in (f"class_{n}", f"probability_{n}"))])
        rows.writerows(
            [p.name, *(cell for name, share in p.top for cell in (name, f"{share:.6f}"))] for p in predictions
        )
