"""What a run with a text tower has besides: its tokenizer, and the features of an image tower that is locked."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softmoe.data import (
    Batch,
    Source,
    Tokenizer,
    Transform,
    TransformConfig,
    captions_of,
    some_captions,
    train_tokenizer,
)
from softmoe.data.batch import with_draws
from softmoe.data.order import order
from softmoe.models import VisionTransformer
from softmoe.storage.files import write_bytes
from softmoe.storage.saved import TOKENIZER_FILES
from softmoe.train.config import TrainConfig
from softmoe.train.parts import Data, first_examples
from softmoe.train.team import Team

LEARN_FROM = 100_000  # examples whose captions a tokenizer is learned from, at most
Extract = Callable[[VisionTransformer, Source, Transform], Any]
"""Features of all images of a source, with `.vectors` (n, D) and `.indices` (n,): softmoe.evaluate.extract."""


def prepare_tokenizer(config: TrainConfig, folder: Path, source: Source, team: Team) -> Tokenizer:
    """That of the run's folder; a new run gets a copy of the given file, or learns one from its captions."""
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
    """Whether the locked tower sees each image always alike, and at least once on average."""
    t = config.data.transform
    return config.model.locked and not is_random(t) and images <= config.steps * config.data.batch_size


def is_random(t: TransformConfig) -> bool:
    return t.crop in ("inception", "pad_crop") or t.flip or t.rand_layers > 0 or t.erase > 0


@dataclass(frozen=True)
class FeatureData(Data):
    """Batches in which the locked tower's features (B, D) stand where the images were."""

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
        examples = self.config.evaluation.examples
        return batches if examples is None else first_examples(batches, examples)


class FeatureLoader:
    """As softmoe.data.Loader: batches by step, for ever."""

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
