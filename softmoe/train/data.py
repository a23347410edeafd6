"""The data of a run: its training stream, its validation set, and batches cut in parts and moved to the device.

With a text tower a run also has a tokenizer, and an image tower that is locked may be replaced by its features.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softmoe.data import (
    Batch,
    Captioned,
    Feed,
    Loader,
    Source,
    Tokenizer,
    Transform,
    batches_on_device,
    captions_of,
    evaluation_batches,
    open_source,
    open_splits,
    some_captions,
    train_tokenizer,
)
from softmoe.data.batch import with_draws
from softmoe.data.loader import Buffers, workers_for
from softmoe.data.order import order
from softmoe.models import VisionTransformer
from softmoe.models.classification import check_labels
from softmoe.storage.files import write_bytes
from softmoe.storage.saved import TOKENIZER_FILES
from softmoe.train.config import DataSection, TrainConfig
from softmoe.train.distributed import Team

CPU = torch.device("cpu")
LEARN_FROM = 100_000  # examples whose captions a tokenizer is learned from, at most
Extract = Callable[[VisionTransformer, Source, Transform], Any]
"""Features of all images of a source, with `.vectors` (n, D) and `.indices` (n,): softmoe.evaluate.extract."""


def open_sources(config: TrainConfig) -> tuple[Source, Source]:
    """Return the training and the validation images of a run. ValueError if they cannot be used together."""
    d = config.data
    if d.val is None:
        train, val = open_splits(d.train, d.train_split, d.val_split)
    else:
        train, val = open_source(d.train, d.train_split), open_source(d.val, d.val_split)
    if tuple(train.classes) != tuple(val.classes):
        raise ValueError(
            f"training and validation data have different classes: {len(train.classes)} in {d.train}, "
            f"{len(val.classes)} in {d.val or d.train}"
        )
    if len(train.classes) == 1 and config.text.size is None:
        raise ValueError(f"{d.train} has one class only, {train.classes[0]!r}: there is nothing to tell it from")
    outputs = config.model.num_classes
    if outputs is not None and outputs < len(train.classes):
        raise ValueError(
            f"{d.train} has {len(train.classes)} classes, some outside the model's head, which has {outputs} classes: "
            "leave out --model.num-classes"
        )
    if config.model.refit_head and (train.multi_label or val.multi_label):
        raise ValueError(
            f"{d.train} has several labels an image, and a head in closed form takes one: leave out --refit-head"
        )
    if config.text.size is not None:
        return Captioned(train, d.train), Captioned(val, d.val or d.train)
    return train, val


@dataclass(frozen=True)
class Data:
    """The training stream and the validation set of a run."""

    config: TrainConfig
    train: Source
    val: Source
    loader: Loader

    world: int = 1
    rank: int = 0
    tokenizer: Tokenizer | None = None
    """The tokenizer of the text tower, if there is one."""
    captions: bool = True
    """Whether batches have captions."""
    device: torch.device = CPU
    """Where batches go: to another one than the CPU they leave the workers raw (softmoe.data.feed)."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """The validation images met so far that could not be read: name -> reason."""

    @classmethod
    def open(
        cls, config: TrainConfig, world: int = 1, rank: int = 0, captions: bool = True, device: torch.device = CPU
    ) -> "Data":
        d = config.data
        train, val = open_sources(config)
        buffers = buffers_of(d, d.batch_size // world, device.type)
        loader = Loader(
            train,
            Transform(d.transform, train=True),
            d.batch_size,
            config.seed,
            world,
            rank,
            buffers.workers,
            buffers.prefetch,
            d.max_broken,
            captions,
            raw=device.type != "cpu",
        )
        return cls(config, train, val, loader, world, rank, captions=captions, device=device)

    def facts(self) -> dict[str, Any]:
        facts = {"train_data": self.train.fingerprint, "classes": len(self.train.classes)}
        return facts if self.tokenizer is None else facts | {"tokenizer": self.tokenizer.fingerprint}

    @property
    def eval_share(self) -> int:
        """The most images of this rank in a batch of an evaluation, which all ranks share."""
        return -(-self.config.data.eval_batch_size // self.world)

    def validation(self) -> Iterator[Batch]:
        """Yield this rank's share of the validation batches. All ranks have equally many; a batch may be empty."""
        d, examples = self.config.data, self.config.evaluation.examples
        buffers = buffers_of(d, self.eval_share, self.device.type)
        made = evaluation_batches(
            self.val,
            Transform(d.transform, train=False),
            d.eval_batch_size,
            self.world,
            self.rank,
            buffers.workers,
            buffers.prefetch,
            self.captions,
            raw=self.device.type != "cpu",
        )
        return batches_on_device(first_examples(self._watched(made), examples, d.eval_batch_size), self.device)

    def _watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.unreadable.update(batch.broken)
            yield batch

    def feed(self, batches: Iterable[Batch], device: torch.device) -> Feed:
        """Bring training batches to the device, one ahead. Labels are checked while they are still on the CPU."""
        classes = len(self.train.classes)
        outputs = self.config.model.num_classes or classes

        def checked() -> Iterator[Batch]:
            for batch in batches:
                if self.tokenizer is None and outputs:
                    check_labels(batch.labels, outputs)
                yield batch

        return Feed(batches if device.type == "cpu" else checked(), device, classes)


def buffers_of(d: DataSection, images: int, device: str) -> Buffers:
    """Return how many workers make batches of so many images for this type of device, and how many batches may wait."""
    height, width = d.transform.size
    image_bytes = 3 * height * width * (4 if device == "cpu" else 1)
    workers = workers_for(device) if d.workers == "auto" else d.workers
    return Buffers.within(d.buffer_mb << 20, workers, d.prefetch, images * image_bytes)


def first_examples(batches: Iterable[Batch], examples: int | None, size: int) -> Iterator[Batch]:
    """Yield one rank's part of the first `examples` of the data, or of all; `size` images are in a batch of all ranks.

    Those among them that cannot be read are left out and not replaced, so that ranks need not know of each other's.
    """
    for batch in itertools.islice(batches, None if examples is None else -(-examples // size)):
        yield batch if examples is None else slice_batch(batch, 0, int((batch.indices < examples).sum()))


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return the images from start to stop of a batch, with everything else that it has for each image."""
    rows = len(batch.images)
    cut = {
        f.name: value[start:stop]
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor | tuple) and len(value) == rows
    }
    return replace(batch, **cut)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Split a batch into `count` equal parts."""
    size = len(batch.images) // count
    return [batch] if count == 1 else [slice_batch(batch, i * size, (i + 1) * size) for i in range(count)]


def prepare_tokenizer(config: TrainConfig, folder: Path, source: Source, team: Team) -> Tokenizer:
    """Open the tokenizer of a run's folder; a new run copies the given file, or learns one from its captions."""
    if team.leads and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        t = config.text
        if t.tokenizer is not None:
            made = Tokenizer.open(t.tokenizer, t.lower)
        else:
            made = train_tokenizer(some_captions(source, LEARN_FROM), t.vocab_size, lower=t.lower)
        write_bytes(folder / made.name, made.data)
    team.wait()
    path = next(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
    return Tokenizer.open(path, config.text.lower)


def can_keep_features(config: TrainConfig, images: int) -> bool:
    """Tell if the locked tower sees each image without random changes, and at least once on average."""
    t = config.data.transform
    is_random = t.crop in ("inception", "pad_crop") or t.flip or t.rand_layers > 0 or t.erase > 0
    return config.model.locked and not is_random and images <= config.steps * config.data.batch_size


@dataclass(frozen=True)
class FeatureData(Data):
    """Data whose batches have the locked tower's features (B, D) in place of images."""

    train_features: Any = None
    val_features: Any = None

    @classmethod
    def of(cls, data: Data, tower: VisionTransformer, extract: Extract) -> "FeatureData":
        transform = Transform(data.config.data.transform, train=False)
        train, val = (extract(tower, source, transform) for source in (data.train, data.val))
        loader: Any = FeatureLoader(data.train, train, data.config)
        return cls(**vars(data) | {"loader": loader, "train_features": train, "val_features": val})

    def validation(self) -> Iterator[Batch]:
        rows, size = np.arange(len(self.val_features.indices)), self.config.data.eval_batch_size
        starts = range(0, len(rows), size)
        batches = (feature_batch(self.val, self.val_features, rows[start : start + size]) for start in starts)
        return batches_on_device(first_examples(batches, self.config.evaluation.examples, size), self.device)


class FeatureLoader:
    """Yields batches of features by step, without end, as softmoe.data.Loader does batches of images."""

    def __init__(self, source: Source, features: Any, config: TrainConfig):
        self.source, self.features, self.config = source, features, config
        self.broken: dict[str, str] = {}

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        seed, size = self.config.seed, self.config.data.batch_size
        for step in itertools.count(start_step):
            rows = order(len(self.features.indices), seed, step, size)
            yield with_draws(feature_batch(self.source, self.features, rows), seed, step, 0)


def feature_batch(source: Source, features: Any, rows: np.ndarray) -> Batch:
    examples = features.indices[rows]
    return Batch(
        torch.from_numpy(np.ascontiguousarray(features.vectors[rows])),
        torch.full((len(rows),), -1),
        torch.from_numpy(np.ascontiguousarray(examples)),
        tuple(captions_of(source, examples)),
    )
