"""Build what a run needs from its settings: device, precision, model, average of the weights, data."""

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.data import Batch, Captioned, Loader, Source, Tokenizer, Transform, evaluation_batches, open_source
from softmoe.machine import bfloat16_works
from softmoe.models import TwoTower, TwoTowerConfig, VisionTransformer, ViTConfig
from softmoe.parallel import local
from softmoe.train.config import TrainConfig
from softmoe.train.transfer import start_from


def choose_device(name: str, place: int | None = None) -> torch.device:
    """`place` counts the processes of one machine, if there are several: each takes an accelerator of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and place is not None:
        name = f"cuda:{place}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def choose_precision(wanted: str, device: torch.device, report: Callable[[str], None]) -> torch.dtype | None:
    """The dtype of autocast, or None for plain float32. bfloat16 only where it was seen to work."""
    if wanted == "float32":
        return None
    works = torch.cuda.is_bf16_supported() if device.type == "cuda" else bfloat16_works()
    if works:
        return torch.bfloat16
    report("precision: this machine has no working bfloat16, going on in float32")
    return None


def build_model(
    config: TrainConfig, shape: ViTConfig | TwoTowerConfig, device: torch.device
) -> VisionTransformer | TwoTower:
    """A model, fresh or with given weights; the same for the same seed whatever was drawn before."""
    torch.manual_seed(random_seed(config.seed, "model"))
    model = TwoTower(shape) if isinstance(shape, TwoTowerConfig) else VisionTransformer(shape)
    tower = model.image if isinstance(model, TwoTower) else model
    if config.model.weights is not None:
        start_from(tower, config.model.weights, new_head=config.model.new_head)
    model = model.to(device)
    model.set_gradient_checkpointing(config.gradient_checkpointing)
    return model


def random_seed(*parts: Any) -> int:
    """A seed from any values. Each step draws from (seed, step) alone, so a resumed run draws the same."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Average:
    """A copy of the model whose weights are the running mean of the model's: e = decay * e + (1 - decay) * w.

    `twin` is an equal model to become the copy, for models that cannot be copied because they are spread over ranks.
    """

    def __init__(self, model: nn.Module, decay: float, twin: nn.Module | None = None):
        self.model = (copy.deepcopy(model) if twin is None else twin).requires_grad_(False).eval()
        self.decay = decay
        self._averages: list[Tensor] = [local(p.detach()) for p in self.model.parameters()]
        self._weights: list[Tensor] = [local(p.detach()) for p in model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._averages, self._weights, 1.0 - self.decay)  # pyright: ignore[reportPrivateImportUsage]


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
    """Of a text tower."""
    captions: bool = True
    """Whether batches have them."""

    @classmethod
    def open(cls, config: TrainConfig, world: int = 1, rank: int = 0, captions: bool = True) -> "Data":
        d = config.data
        train = open_source(d.train, d.train_split)
        val = open_source(d.val or d.train, d.val_split)
        if tuple(train.classes) != tuple(val.classes):
            raise ValueError(
                f"training and validation data have different classes: {len(train.classes)} in {d.train}, "
                f"{len(val.classes)} in {d.val or d.train}"
            )
        if config.text.size is not None:
            train, val = Captioned(train, d.train), Captioned(val, d.val or d.train)
        loader = Loader(
            train,
            Transform(d.transform, train=True),
            d.batch_size,
            config.seed,
            world,
            rank,
            d.workers,
            d.prefetch,
            d.max_broken,
            captions,
        )
        return cls(config, train, val, loader, world, rank, captions=captions)

    def facts(self) -> dict[str, Any]:
        facts = {"train_data": self.train.fingerprint, "classes": len(self.train.classes)}
        return facts if self.tokenizer is None else facts | {"tokenizer": self.tokenizer.fingerprint}

    @property
    def eval_share(self) -> int:
        """Images of this rank in each batch of an evaluation; the last may have fewer."""
        return -(-self.config.data.eval_batch_size // self.world)

    def validation(self) -> Iterator[Batch]:
        """This rank's share. Of many, all have the same number of batches, but a batch may be empty."""
        d, examples = self.config.data, self.config.evaluation.examples
        size = self.eval_share * self.world
        batches = evaluation_batches(
            self.val,
            Transform(d.transform, train=False),
            size,
            self.world,
            self.rank,
            d.workers,
            d.prefetch,
            self.captions,
        )
        if examples is None:
            return batches
        return first_examples(batches, examples) if self.world == 1 else share_of_first(batches, examples, size)


def first_examples(batches: Iterable[Batch], examples: int) -> Iterator[Batch]:
    left = examples
    for batch in batches:
        yield batch if len(batch) <= left else slice_batch(batch, 0, left)
        left -= len(batch)
        if left <= 0:
            return


def share_of_first(batches: Iterable[Batch], examples: int, size: int) -> Iterator[Batch]:
    """One rank's part of the first `examples`; `size` images are in a batch of all ranks."""
    for batch in itertools.islice(batches, -(-examples // size)):
        yield slice_batch(batch, 0, int((batch.indices < examples).sum()))


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Rows start..stop of everything in the batch that has a row per image."""
    rows = len(batch.images)
    cut = {
        f.name: value[start:stop]
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor | tuple) and len(value) == rows
    }
    return replace(batch, **cut)


def split_batch(batch: Any, count: int) -> list[Any]:
    """`count` equal parts."""
    size = len(batch.images) // count
    return [batch] if count == 1 else [slice_batch(batch, i * size, (i + 1) * size) for i in range(count)]


def to_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    moved = {
        f.name: value.to(device, non_blocking=True)
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor)
    }
    return replace(batch, **moved)
