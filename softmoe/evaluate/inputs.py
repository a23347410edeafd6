"""The inputs of the evaluators: a model with its preprocessing, and sources of images named on the command line."""

import glob
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from softmoe.accelerate.guards import swap_class
from softmoe.convert.foreign import open_foreign, with_options
from softmoe.data import Example, Source, Transform, TransformConfig, captions_of
from softmoe.data.decode import decode, read_image_file
from softmoe.data.files import IMAGE_SUFFIXES, is_image_name, report_left_out
from softmoe.data.source import MinSide, fingerprint
from softmoe.inference import Storage, open_mapped, prepare
from softmoe.machine import Precision, choose_device, choose_precision
from softmoe.models import TwoTower, VisionTransformer
from softmoe.models.classification import Loss
from softmoe.models.embed import unseen_pixels
from softmoe.paths import home_path
from softmoe.storage import Preprocessing, SavedModel, load_saved, open_saved
from softmoe.storage.files import read_json

logger = logging.getLogger("softmoe")
AnyModel = TypeVar("AnyModel", VisionTransformer, TwoTower)
Method = TypeVar("Method", bound=Callable[..., Any])
ReadBatch = Callable[..., list[Example]]  # (indices, captions)


@dataclass(frozen=True)
class Loaded:
    """A model ready to be evaluated."""

    model: VisionTransformer
    saved: SavedModel
    preprocessing: Preprocessing

    @property
    def transform(self) -> Transform:
        return evaluation_transform(self.preprocessing)

    @property
    def loss(self) -> Loss:
        """The loss the model was trained with, which says what its outputs mean; softmax if it is not known."""
        return "sigmoid" if self.saved.provenance.get("loss") == "sigmoid" else "softmax"

    def class_names(self) -> tuple[str, ...]:
        count = self.model.config.num_classes or 0
        return self.saved.classes or tuple(f"class {i}" for i in range(count))


def open_model(where: str | Path) -> SavedModel:
    """Open the saved model that a user names, and say so if it is the checkpoint of a run that has not ended."""
    saved = open_saved(where)
    if saved.folder.parent.name == "checkpoints" and saved.folder != home_path(where):
        step, steps = saved.provenance["step"], read_json(saved.folder / "state.json")["config"]["steps"]
        if step < steps:
            message = "softmoe: the run %s is not finished: this is its checkpoint of step %s of %s"
            logger.warning(message, where, step, steps)
    return saved


def load(
    where: str | Path,
    *,
    device: str = "auto",
    image_size: int | tuple[int, int] | None = None,
    weights: Storage | None = None,
    precision: Precision = "auto",
    foreign_options: Mapping[str, Any] | None = None,
) -> Loaded:
    """Load a saved model, run, Hub id, or others' weights, for evaluation.

    `image_size` is another resolution than the model was saved with. `weights` prepares the model for fast inference.
    `foreign_options` states what a file of others' weights does not (mean, std, heads, activation).
    """
    foreign = open_foreign(with_options(str(where), foreign_options or {}))
    saved = foreign or open_model(where)
    place, p = choose_device(device), preprocessing_at(saved, image_size)
    if weights == "mapped":
        if foreign is not None:
            raise ValueError(f"mapped weights are those of a saved model; {where} has others': softmoe.save_pretrained")
        if place.type != "cpu":
            raise ValueError(f"mapped weights are used where they lie, on the CPU, not on {place}")
        return Loaded(open_mapped(saved.folder), saved, p)
    dtype = None if weights is None else torch.float32
    model = load_saved(saved, place, dtype=dtype) if foreign is None else foreign.model.to(place, dtype)
    return Loaded(compute_in(precision, model if weights is None else prepare(model, weights)), saved, p)


def compute_in(precision: Precision, model: AnyModel) -> AnyModel:
    """Let a model compute its products in this precision, whoever calls it: its methods run under autocast."""
    device = next(model.parameters()).device
    dtype = choose_precision(precision, device, logger.warning)
    if dtype is not None:
        swap_class(model, VisionTransformer, CastVisionTransformer)
        swap_class(model, TwoTower, CastTwoTower)
    model.__dict__["computes_in"] = dtype  # part of the key under which its features are cached
    return model


def in_own_precision(method: Method) -> Method:
    """Run a method of a model under autocast to the dtype that `compute_in` left on the model, if any."""

    @wraps(method)
    def cast(model: nn.Module, *args: Any, **options: Any) -> Any:
        dtype = vars(model).get("computes_in")
        if dtype is None:
            return method(model, *args, **options)
        with torch.autocast(next(model.parameters()).device.type, dtype=dtype):  # a new one: methods call each other
            return method(model, *args, **options)

    return cast  # pyright: ignore[reportReturnType]


class CastVisionTransformer(VisionTransformer):
    """A vision transformer that computes in the precision given to `compute_in`, and so do its copies."""

    forward = in_own_precision(VisionTransformer.forward)
    forward_features = in_own_precision(VisionTransformer.forward_features)
    forward_vector = in_own_precision(VisionTransformer.forward_vector)
    forward_head = in_own_precision(VisionTransformer.forward_head)
    embed_images = in_own_precision(VisionTransformer.embed_images)


class CastTwoTower(TwoTower):
    """Two towers that compute in the precision given to `compute_in`, and so do their copies."""

    forward = in_own_precision(TwoTower.forward)
    embed_images = in_own_precision(TwoTower.embed_images)
    embed_texts = in_own_precision(TwoTower.embed_texts)


def preprocessing_at(saved: SavedModel, image_size: int | tuple[int, int] | None) -> Preprocessing:
    """Return the preprocessing of the saved model, or that for images of another size.

    Pixels of that size which the model will not see are told about.
    """
    if image_size is None:
        return saved.preprocessing
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    for said in unseen_pixels(size, saved.config.patch_size):
        logger.warning("softmoe: %s", said)
    return replace(saved.preprocessing, image_size=size)


def evaluation_transform(p: Preprocessing) -> Transform:
    config = TransformConfig(image_size=p.image_size, crop=p.crop, central_ratio=p.central_ratio, antialias=p.antialias)
    return Transform(config, train=False)


class Subset(Source):
    """Some examples of a source, in its order."""

    def __init__(self, source: Source, indices: np.ndarray):
        self.source, self.indices = source, np.sort(indices)
        self.classes, self.multi_label = source.classes, source.multi_label
        self.fingerprint = fingerprint("subset", source.fingerprint, self.indices.tolist())

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        return self.source.read(int(self.indices[index]), min_side)

    def read_captions(self, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
        return captions_of(self.source, self.indices[np.asarray(indices, dtype=np.int64)])

    @property
    def read_batch(self) -> ReadBatch | None:
        inner = getattr(self.source, "read_batch", None)
        if inner is None:
            return None
        return lambda indices, *wanted: inner(self.indices[np.asarray(indices, dtype=np.int64)], *wanted)


def random_subset(source: Source, examples: int | None, seed: int = 0) -> Source:
    """Choose so many examples at random, or all."""
    if examples is not None and examples < 1:
        raise ValueError(f"the number of examples must be at least 1, got {examples}")
    if examples is None or examples >= len(source):
        return source
    return Subset(source, np.random.default_rng(seed).choice(len(source), examples, replace=False))


class Relabeled(Source):
    """A source whose classes are numbered as the model numbers them."""

    def __init__(self, source: Source, classes: tuple[str, ...], numbers: tuple[int, ...]):
        self.source, self.classes, self.numbers = source, classes, numbers
        self.multi_label = source.multi_label
        self.fingerprint = fingerprint("relabeled", source.fingerprint, json.dumps(classes), numbers)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        return self._renumber(self.source.read(index, min_side))

    @property
    def read_batch(self) -> ReadBatch | None:
        inner = getattr(self.source, "read_batch", None)
        return None if inner is None else lambda *wanted: [self._renumber(example) for example in inner(*wanted)]

    def _renumber(self, example: Example) -> Example:
        return replace(example, labels=tuple(self.numbers[label] for label in example.labels))


class NewLabels(Source):
    """A source with other labels, several or none for an image, in the model's numbering: ReaL for ImageNet.

    `labels` maps the name of an image file without its ending to class numbers; or it is a list in which the number
    at the end of the name, from 1, is the place (as in ReaL's own file, for names like ILSVRC2012_val_00000001).
    """

    multi_label = True

    def __init__(self, source: Source, labels: dict[str, list[int]] | list[list[int]], classes: tuple[str, ...]):
        self.source, self.labels, self.classes = source, labels, classes
        self.fingerprint = fingerprint("labels", source.fingerprint, json.dumps(labels, sort_keys=True))

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        example = self.source.read(index, min_side)
        return replace(example, labels=tuple(self._find(example.name)))

    def _find(self, name: str) -> list[int]:
        stem = Path(name).stem
        if isinstance(self.labels, dict):
            found = self.labels.get(stem)
        else:
            digits = re.search(r"\d+$", stem)
            place = int(digits[0]) if digits else 0
            found = self.labels[place - 1] if 0 < place <= len(self.labels) else None
        if found is None:
            raise ValueError(f"the file of labels has none for the image {name}")
        return found


def read_labels(path: str | Path) -> dict[str, list[int]] | list[list[int]]:
    """Read a JSON list or object of lists of class numbers."""
    values = read_json(Path(path))
    rows = values.values() if isinstance(values, dict) else values if isinstance(values, list) else [None]
    if not all(isinstance(row, list) and all(type(label) is int for label in row) for row in rows):
        raise ValueError(f"{path} must be a list, or an object by image name, of lists of class numbers")
    return values


def match_classes(source: Source, classes: Sequence[str] | None, outputs: int) -> tuple[Source, str]:
    """Return the source with labels in the model's numbering, and how they were matched: by name or by number.

    By name if the model knows its classes and all of the data's are among them (data of a few of the classes works
    too); else by number, if there are as many.
    """
    if not source.classes:
        raise ValueError("this data has no classes, so nothing can be right or wrong")
    if classes is not None and set(source.classes) <= set(classes) and len(set(classes)) == len(classes):
        numbers = tuple(classes.index(name) for name in source.classes)
        if numbers == tuple(range(outputs)):
            return source, "name"
        return Relabeled(source, tuple(classes), numbers), "name"
    if len(source.classes) == outputs:
        return source, "number"
    unknown = [] if classes is None else [name for name in source.classes if name not in classes]
    why = f", and the model does not know its class {unknown[0]!r}" if unknown else ""
    raise ValueError(
        f"the data has {len(source.classes)} classes, but the model has {outputs}{why}: softmoe finetune MODEL DATA "
        "teaches it these, softmoe fewshot MODEL DATA measures its features on them"
    )


class FileSource(Source):
    """Image files without labels, for prediction."""

    classes: tuple[str, ...] = ()
    multi_label = False

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)
        self.fingerprint = fingerprint("files", *(str(path) for path in self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        name = str(self.paths[index])
        return Example(decode(read_image_file(self.paths[index], name), name, min_side), (), name=name)


def find_images(patterns: Sequence[str]) -> list[Path]:
    """List the named files, all images below folders, and the matches of patterns; sorted within each, each once.

    A name that matches nothing stays in the list, to be reported with the unreadable ones.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = home_path(pattern)
        if "://" in pattern:
            raise ValueError(f"{pattern} is an address: download it first, and give the file or its folder")
        if path.is_dir():
            files = [p for p in path.rglob("*") if not p.is_dir()]
            report_left_out(path, [p.name for p in files])
            below = [p for p in files if is_image_name(p.name)]
            if not below:
                raise ValueError(f"the folder {path} holds no images; known endings are {' '.join(IMAGE_SUFFIXES)}")
            found |= dict.fromkeys(sorted(below))
        elif path.exists() or not glob.has_magic(pattern):
            found[path] = None
        else:
            matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
            if not matches:
                raise ValueError(f"no file matches {pattern!r}")
            found |= dict.fromkeys(p for p in matches if not p.is_dir())
    if not found:
        raise ValueError("give at least one image, folder or pattern")
    return list(found)


def facts_of(saved: SavedModel, seen: Preprocessing, data: dict[str, Source], *, split: str) -> dict[str, Any]:
    """Return the facts that a number needs beside it to mean something later."""
    return {
        "model": str(saved.folder),
        "model_fingerprint": saved.fingerprint,
        "preprocessing": asdict(seen),
        "data": {name: source.fingerprint for name, source in data.items()},
        "split": split,
    }
