"""Classes by their names alone: an image is what its nearest sentence says.

Letters: n images, C classes, E width of the common space.

Each class name is put into several templates ("a photo of a {}"); the mean of their vectors, made of length 1 again,
stands for the class. Names and templates are canonicalized as in big_vision: underscores become spaces, punctuation
goes, all in lower case. Ties count as misses.
"""

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softmoe.data import Source
from softmoe.evaluate.command import OverFeatures, function
from softmoe.evaluate.features import Progress
from softmoe.evaluate.inputs import open_data, random_subset
from softmoe.evaluate.retrieval import TIE
from softmoe.evaluate.towers import Towers, load_towers
from softmoe.models.two_tower import unit
from softmoe.storage.files import read_json

TEMPLATES = (
    "{}",
    "a {}",
    "a photo of a {}",
    "a picture of a {}",
    "an image of the {}",
    "a close-up of a {}",
    "a photo with one {} in it",
    "this is a {}",
)
_PLACE = "{}"
_BLOCK = 1024  # images at a time


def canonical(text: str) -> str:
    """Lower case, no punctuation but the placeholder {}, single spaces."""
    parts = text.replace("_", " ").split(_PLACE)
    return " ".join(_PLACE.join(re.sub(r"[^\w\s]", "", part) for part in parts).lower().split())


@dataclass(frozen=True)
class ZeroShot(OverFeatures):
    """Accuracy of two towers that know the classes by name only."""

    model: str | Path
    """Folder of a saved model with two towers or of its run, or a Hub id (user/name)."""
    data: str
    """Source of images with classes: a folder with SPLIT/CLASS/IMAGE, or shapes, wds:PATTERN, hf:NAME."""
    _: KW_ONLY
    split: str = "val"
    classes: str | Path | None = None
    """JSON with names for the classes: a list in the order of the labels, or an object by the data's names."""
    templates: tuple[str, ...] | None = None
    """Sentences with {} where the name goes, or one .txt file with one a line."""
    examples: int | None = None
    """Evaluate on so many images only, chosen at random (always the same ones)."""

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Top-1 and top-5, the chance of a guess, and what was measured."""
        source = random_subset(open_data(self.data, self.split), self.examples)
        if not source.classes:
            raise ValueError("this data has no classes, so nothing can be right or wrong; try `softmoe retrieve`")
        names = class_names(source, self.classes)
        prompts = check_templates(TEMPLATES if self.templates is None else read_templates(self.templates))
        towers = load_towers(self.model, device=self.device, image_size=self.image_size)
        image_nE, features = towers.embed_images(source, **self.feature_options(progress))
        class_CE = class_vectors(towers, names, prompts)
        rank_n = ranks(image_nE, torch.from_numpy(features.labels), class_CE)
        labeled = rank_n[rank_n >= 0]
        if not len(labeled):
            raise ValueError("there is nothing to evaluate on: no image has a label")
        return {
            "model": str(towers.saved.folder),
            "model_fingerprint": towers.saved.fingerprint,
            "data": {self.data: source.fingerprint},
            "split": self.split,
            "numbers": {f"top{k}": float((labeled < k).double().mean()) for k in (1, 5)},
            "chance": 1 / len(names),
            "images": len(labeled),
            "classes": list(names),
            "templates": list(prompts),
        }


zeroshot = function(ZeroShot)


def read_templates(given: Sequence[str]) -> Sequence[str]:
    """The sentences as given, or the lines of one .txt file."""
    if len(given) != 1 or not given[0].endswith(".txt"):
        return given
    return [line.strip() for line in Path(given[0]).read_text(encoding="utf-8").splitlines() if line.strip()]


def class_vectors(towers: Towers, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """(C, E) of length 1: the mean of the vectors of all templates."""
    texts = [template.replace(_PLACE, name) for name in names for template in templates]
    text_CTE = towers.embed_texts(texts).unflatten(0, (len(names), len(templates)))
    return unit(text_CTE.mean(1))


def ranks(image_nE: Tensor, labels: Tensor, class_CE: Tensor) -> Tensor:
    """(n,): how many wrong classes are at least as near as the nearest right one; -1 for an image without a label.

    Labels are (n,) class numbers or (n, C) with 1 where a class applies.
    """
    number_C = torch.arange(len(class_CE))
    found = []
    for image_bE, label_b in zip(image_nE.split(_BLOCK), labels.split(_BLOCK), strict=True):
        right_bC = label_b > 0 if label_b.ndim == 2 else label_b[:, None] == number_C
        cosine_bC = image_bE.double() @ class_CE.double().T
        best_b1 = cosine_bC.masked_fill(~right_bC, -torch.inf).amax(1, keepdim=True)
        rank_b = ((cosine_bC >= best_b1 - TIE) & ~right_bC).sum(1)
        found.append(torch.where(right_bC.any(1), rank_b, -1))
    return torch.cat(found)


def class_names(source: Source, file: str | Path | None) -> tuple[str, ...]:
    """Canonical names in the order of the labels. ValueError where two classes have the same."""
    given = list(source.classes) if file is None else read_names(file, source.classes)
    names = [canonical(name) for name in given]
    seen: dict[str, int] = {}
    for number, name in enumerate(names):
        if not name:
            raise ValueError(f"class {number} has no name that can be said: {given[number]!r}; use --classes")
        if name in seen:
            raise ValueError(
                f"the classes {seen[name]} and {number} are both called {name!r}, so no sentence can tell them apart: "
                "give them names of their own with --classes names.json"
            )
        seen[name] = number
    return tuple(names)


def read_names(file: str | Path, classes: Sequence[str]) -> list[str]:
    """A JSON list in the order of the labels, or an object by the data's names or by number; of several the first."""
    values = read_json(Path(file))
    rows: list[Any]
    if isinstance(values, list):
        if len(values) != len(classes):
            raise ValueError(f"{file} names {len(values)} classes, but the data has {len(classes)}")
        rows = values
    elif isinstance(values, dict):
        rows = [values.get(name, values.get(str(number))) for number, name in enumerate(classes)]
        if None in rows:
            raise ValueError(f"{file} has no name for the class {classes[rows.index(None)]!r}")
    else:
        raise ValueError(f"{file} must be a list of names, or an object of them by class")
    names: list[Any] = [row[0] if isinstance(row, list) and row else row for row in rows]
    wrong = next((name for name in names if not isinstance(name, str)), None)
    if wrong is not None:
        raise ValueError(f"{file}: a name is a string, or a list whose first is taken, not {wrong!r}")
    return names


def check_templates(templates: Sequence[str]) -> tuple[str, ...]:
    """Canonical templates. ValueError for one without a place for the name."""
    if not templates:
        raise ValueError("give at least one template, such as 'a photo of a {}'")
    for template in templates:
        if template.count(_PLACE) != 1:
            raise ValueError(f"a template has one {{}} where the name goes, not {template!r}")
    return tuple(canonical(template) for template in templates)
