"""Models of images and texts, measured: retrieval (which text belongs to which image) and zero-shot classification.

Letters: n images, t texts, C classes, D width of the image tower, E width of the common space.

Retrieval is exact: every text is compared with every image, in float64, block by block, so memory does not grow with
the data. A score within TIE of the right one's counts as above it: a model that says the same of all gets nothing.

Zero-shot: each class name is put into several templates ("a photo of a {}"); the mean of their vectors, made of length
1 again, stands for the class. Names and templates are canonicalized as in big_vision: underscores become spaces,
punctuation goes, all in lower case. Ties count as misses.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softmoe.data import Captioned, Source, Tokenizer, Transform, captions_of, open_source
from softmoe.evaluate.api import Retrieve, ZeroShot
from softmoe.evaluate.features import Features, Progress, extract
from softmoe.evaluate.inputs import (
    compute_in,
    evaluation_transform,
    facts_of,
    open_model,
    preprocessing_at,
    random_subset,
)
from softmoe.machine import Precision, choose_device
from softmoe.models import TwoTower
from softmoe.models.two_tower import unit
from softmoe.moe.record import evaluating
from softmoe.storage import Preprocessing, SavedModel, load_two_tower
from softmoe.storage.files import read_json

_CHUNK = 4096  # features projected at a time


@dataclass(frozen=True)
class Towers:
    """An image tower, a text tower and their tokenizer."""

    model: TwoTower
    tokenizer: Tokenizer
    saved: SavedModel
    preprocessing: Preprocessing

    @property
    def transform(self) -> Transform:
        return evaluation_transform(self.preprocessing)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def embed_texts(self, texts: Sequence[str], batch_size: int = 256) -> Tensor:
        """Return the vectors of texts, (t, E) float32, each row of length 1."""
        rows = []
        with evaluating(self.model), torch.inference_mode():
            for start in range(0, len(texts), batch_size):
                tokens = self.tokenizer.encode(texts[start : start + batch_size], self.model.config.text.length)
                rows.append(self.model.embed_texts(tokens.to(self.device)).float().cpu())
        return torch.cat(rows) if rows else torch.zeros(0, self.model.text.projection.out_features)

    def embed_images(self, source: Source, **options: Any) -> tuple[Tensor, Features]:
        """Return (n, E) float32 of the readable images, and their features, which are kept on disk for the next time.

        `options` are those of `extract`: batch_size, workers, cache, progress.
        """
        features = extract(self.model.image, source, self.transform, **options)
        return self.project(features.vectors), features

    def project(self, vectors_nD: np.ndarray) -> Tensor:
        """Project features of the image tower into the common space, (n, E)."""
        rows = []
        with evaluating(self.model), torch.inference_mode():
            for start in range(0, len(vectors_nD), _CHUNK):
                part = torch.from_numpy(np.array(vectors_nD[start : start + _CHUNK]))
                rows.append(self.model.embed_images(part.to(self.device)).float().cpu())
        return torch.cat(rows)


def load_towers(
    where: str | Path,
    *,
    device: str = "auto",
    image_size: int | tuple[int, int] | None = None,
    precision: Precision = "auto",
) -> Towers:
    """Open the two towers of a saved folder, a run or a Hub id; at another resolution if asked."""
    saved = open_model(where)
    model = compute_in(precision, load_two_tower(saved, choose_device(device)))
    compute_in(precision, model.image)  # its features are computed and kept by themselves
    assert saved.tokenizer is not None
    tokenizer = Tokenizer(saved.tokenizer.name, saved.tokenizer.data, saved.tokenizer.lower)
    if tokenizer.size != model.config.text.vocab_size:
        raise ValueError(
            f"the tokenizer of {where} has {tokenizer.size} tokens, its text tower {model.config.text.vocab_size}"
        )
    return Towers(model, tokenizer, saved, preprocessing_at(saved, image_size))


AT = (1, 5, 10)
TIE = 1e-9
_BLOCK = 1024


def run_retrieve(options: Retrieve, progress: Progress | None = None) -> dict[str, Any]:
    """Return recalls with all captions of every image. Images without a caption are left out."""
    source = Captioned(random_subset(open_source(options.data, options.split), options.examples), options.data)
    towers = load_towers(options.model, **options.model_options)
    image_nE, features = towers.embed_images(source, **options.feature_options(progress))
    texts, owners = [], []
    for row, captions in enumerate(captions_of(source, features.indices)):
        texts += captions
        owners += [row] * len(captions)
    owner_t, number_n = torch.tensor(owners), torch.arange(len(image_nE))
    text_tE = towers.embed_texts(texts)
    return {
        **facts_of(towers.saved, towers.preprocessing, {options.data: source}, split=options.split),
        "images": len(image_nE),
        "captions": len(texts),
        "left_out": len(source) - len(image_nE),
        "image_to_text": recalls(ranks(image_nE, number_n, text_tE, owner_t)),
        "text_to_image": recalls(ranks(text_tE, owner_t, image_nE, number_n)),
    }


def recalls(rank: Tensor, at: Sequence[int] = AT) -> dict[str, float]:
    """Return the share of the ranks (from 0) below each k, and the median rank counted from 1."""
    found = {f"recall@{k}": float((rank < k).double().mean()) for k in at}
    return found | {"median_rank": float(rank.double().median()) + 1}


def ranks(rows_rE: Tensor, owner_r: Tensor, others_cE: Tensor, owner_c: Tensor, block: int = _BLOCK) -> Tensor:
    """Count for each row (r,) how many of another owner are at least as near as the nearest of its own.

    From texts to images each row has one such other, from images to texts several.
    """
    found = []
    for row_bE, owner_b in zip(rows_rE.double().split(block), owner_r.split(block), strict=True):
        best_b = torch.full((len(row_bE),), -torch.inf, dtype=torch.float64)
        rank_b = torch.zeros(len(row_bE), dtype=torch.int64)
        for again in (False, True):  # first the nearest of the own, then who is nearer; the same products both times
            for other_cE, owners in zip(others_cE.split(block), owner_c.split(block), strict=True):
                cosine_bc = row_bE @ other_cE.double().T
                own_bc = owner_b[:, None] == owners
                if again:
                    rank_b += ((cosine_bc >= best_b[:, None] - TIE) & ~own_bc).sum(1)
                else:
                    best_b = torch.maximum(best_b, cosine_bc.masked_fill(~own_bc, -torch.inf).amax(1))
        found.append(rank_b)
    return torch.cat(found)


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


def canonical(text: str) -> str:
    """Return a text in lower case with single spaces, and no punctuation but the placeholder {}."""
    parts = text.replace("_", " ").split(_PLACE)
    return " ".join(_PLACE.join(re.sub(r"[^\w\s]", "", part) for part in parts).lower().split())


def run_zeroshot(options: ZeroShot, progress: Progress | None = None) -> dict[str, Any]:
    """Return top-1 and top-5, the chance of a guess, and what was measured."""
    source = random_subset(open_source(options.data, options.split), options.examples)
    if not source.classes:
        raise ValueError("this data has no classes, so nothing can be right or wrong; try `softmoe retrieve`")
    names = class_names(source, options.classes)
    prompts = check_templates(TEMPLATES if options.templates is None else read_templates(options.templates))
    towers = load_towers(options.model, **options.model_options)
    image_nE, features = towers.embed_images(source, **options.feature_options(progress))
    class_CE = class_vectors(towers, names, prompts)
    rank_n = class_ranks(image_nE, torch.from_numpy(features.labels), class_CE)
    labeled = rank_n[rank_n >= 0]
    if not len(labeled):
        raise ValueError("there is nothing to evaluate on: no image has a label")
    return {
        **facts_of(towers.saved, towers.preprocessing, {options.data: source}, split=options.split),
        "numbers": {f"top{k}": float((labeled < k).double().mean()) for k in (1, 5)},
        "chance": 1 / len(names),
        "images": len(labeled),
        "classes": list(names),
        "templates": list(prompts),
    }


def read_templates(given: Sequence[str]) -> Sequence[str]:
    """Return the sentences as given, or the lines of one .txt file."""
    if len(given) != 1 or not given[0].endswith(".txt"):
        return given
    return [line.strip() for line in Path(given[0]).read_text(encoding="utf-8").splitlines() if line.strip()]


def class_vectors(towers: Towers, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Return (C, E) of length 1: the mean of the vectors of all templates."""
    texts = [template.replace(_PLACE, name) for name in names for template in templates]
    text_CTE = towers.embed_texts(texts).unflatten(0, (len(names), len(templates)))
    return unit(text_CTE.mean(1))


def class_ranks(image_nE: Tensor, labels: Tensor, class_CE: Tensor) -> Tensor:
    """Count for each image (n,) the wrong classes that are at least as near as the nearest right one; -1: no label.

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
    """Return the classes' canonical names in the order of the labels. ValueError where two have the same."""
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
    """Read a list in the order of the labels, or an object by the data's names or numbers; of several the first."""
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
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise ValueError(f"{file}: a name is a string, or a list whose first is taken, not {wrong[0]!r}")
    return names


def check_templates(templates: Sequence[str]) -> tuple[str, ...]:
    """Return the templates in canonical form. ValueError for one without a place for the name."""
    if not templates:
        raise ValueError("give at least one template, such as 'a photo of a {}'")
    for template in templates:
        if template.count(_PLACE) != 1:
            raise ValueError(f"a template has one {{}} where the name goes, not {template!r}")
    return tuple(canonical(template) for template in templates)
