"""One batch, made from its step number alone.

Every random draw depends on (seed, step, place in the whole batch) and on nothing else: not on which worker
makes the batch, nor on how many there are, nor on what was made before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

from softmoe.data.augment import (
    Rectangle,
    cutmix,
    draw_erasing,
    draw_rectangle,
    erase,
    mixup,
    mixup_weights,
    soft_labels,
)
from softmoe.data.decode import BrokenImage
from softmoe.data.order import GOLDEN, check_batch, mix64, order
from softmoe.data.source import Example, Source
from softmoe.data.transforms import Plan, Transform, to_tensor
from softmoe.storage.files import printable

_TRANSFORM, _REPLACE, _MIXUP = range(3)  # what a generator is for
_REPLACEMENTS = 64  # tries before giving up on a place
_SMALL = 1 << 16  # bytes of a tensor that are sent as they are


@dataclass(frozen=True)
class Batch:
    """B images and what is known about them.

    images    (B, 3, H, W) float32 in [-1, 1]; in a raw batch (feed.py) still (B, H, W, 3) uint8
    labels    (B,) int64, -1 where the source has no classes; or (B, C) float32: multi-hot, or blended by mixup
    indices   (B,) int64, which examples of the source these are
    captions  for each image, its sentences; none where they were not asked for
    broken    (name, reason) of images that could not be read; others stand in their place in training
    draws     (B,) int64, in training where images have several captions: a random number that chooses one
    mirrored  (B,) bool, in a raw batch: whose left and right are still to be exchanged
    erased    (E, 6) int64, in a raw batch: the rectangles that are still to be erased (augment.draw_erasing)
    blend     (size,) float32, in a raw batch: the weights of the mixup that is still to be done
    paste     in a raw batch: the rectangle of the cutmix that is still to be done
    """

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    captions: tuple[tuple[str, ...], ...] = ()
    broken: tuple[tuple[str, str], ...] = ()
    draws: torch.Tensor | None = None
    mirrored: torch.Tensor | None = None
    erased: torch.Tensor | None = None
    blend: torch.Tensor | None = None
    paste: Rectangle | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __reduce__(self) -> tuple[Callable[..., Batch], tuple[Any, ...]]:
        """Send small tensors as arrays: a tensor from a worker takes a connection of its own (half a millisecond)."""
        parts = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return _unpacked, tuple(p.numpy() if isinstance(p, torch.Tensor) and p.nbytes <= _SMALL else p for p in parts)

    def pin_memory(self) -> Batch:
        """Copy to memory that a GPU can copy from by itself; torch's loader calls this in a thread of its own."""
        return dataclasses.replace(self, **{name: value.pin_memory() for name, value in tensors_of(self).items()})


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """Return the fields of a batch, of any kind, that hold tensors."""
    found = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _unpacked(*parts: Any) -> Batch:
    whole: list[Any] = [torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in parts]
    return Batch(*whole)


class TooManyBroken(ValueError):
    """Raised if more images are unreadable than the run allows."""


def generators(seed: int, step: int, places: Sequence[int] | np.ndarray, purpose: int) -> list[np.random.Generator]:
    """Make a generator for every (seed, step, place, purpose). Philox is counter-based: it needs no earlier draws."""
    key: Any = _Key(seed)
    counters = np.zeros((len(places), 4), dtype=np.uint64)
    counters[:, 1], counters[:, 2], counters[:, 3] = places, step, purpose
    return [np.random.Generator(np.random.Philox(key, counter=counter)) for counter in counters]


class _Key(ISeedSequence):
    """A seed sequence that is Philox' key itself.

    With Philox(key=...) numpy asks the system for entropy first and does not use it, which takes four times as long.
    """

    def __init__(self, seed: int):
        self.key = np.array([seed % 2**64, 0], dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self.key


class Pinning:
    """Tells if batches go to pinned memory: raw ones, if there is a GPU. For workers torch's loader does that."""

    raw: bool

    @property
    def pinned(self) -> bool:
        return self.raw and torch.cuda.is_available()

    def pin_if_needed(self, batch: Batch) -> Batch:
        """Return a batch that was made in this process, in pinned memory if that is needed."""
        return batch.pin_memory() if self.pinned else batch


@dataclass(frozen=True)
class TrainBatches(Pinning):
    """The endless stream of training batches by step; `batch_size` counts all `world` processes."""

    source: Source
    transform: Transform
    batch_size: int
    seed: int
    world: int
    rank: int
    captions: bool = True
    raw: bool = False
    """Leave the rest to the device: see feed.py."""

    def __getitem__(self, step: int) -> Batch:
        return self.make_batches([step])[0]

    def make_batches(self, steps: Sequence[int]) -> list[Batch]:
        """Make one batch of each step, their examples read together where the source can: fewer and longer calls."""
        blocks, mix = getattr(self.source, "blocks", None), getattr(self.source, "mix", 8)
        setting = (self.batch_size, self.world, self.rank, blocks, mix)
        indices = [order(len(self.source), self.seed, step, *setting) for step in steps]
        ready = _read_together(self.source, np.concatenate(indices), self.captions)
        share = self.batch_size // self.world
        return [
            self._make_batch(step, indices[k], None if ready is None else ready[k * share : (k + 1) * share])
            for k, step in enumerate(steps)
        ]

    def _make_batch(self, step: int, indices: np.ndarray, ready: list[Example] | None) -> Batch:
        first = self.rank * (self.batch_size // self.world)
        places = range(first, first + len(indices))
        rngs = generators(self.seed, step, places, _TRANSFORM)

        def replace(k: int) -> np.ndarray:
            return generators(self.seed, step, [places[k]], _REPLACE)[0].integers(0, len(self.source), _REPLACEMENTS)

        batch = _assemble(self.source, self.transform, indices, ready, rngs, self.captions, replace, self.raw)
        batch = with_draws(batch, self.seed, step, first)
        c, later = self.transform.config, {}
        if c.erase and len(drawn := draw_erasing(c.size, c.erase, rngs)):
            later["erased"] = torch.from_numpy(drawn)
        rng = generators(self.seed, step, [0], _MIXUP)[0]
        if c.cutmix and (not c.mixup or rng.random() < 0.5):
            later["paste"] = draw_rectangle(c.size, c.cutmix, rng)
        elif c.mixup:
            later["blend"] = torch.from_numpy(mixup_weights(c.mixup, rng).copy())
        batch = dataclasses.replace(batch, **later)
        return batch if self.raw else mixed(batch, len(self.source.classes))


def with_draws(batch: Batch, seed: int, step: int, first: int) -> Batch:
    """Add random numbers that choose a caption of each image, if there are several.

    `first` is the place of the batch's first image in the batch of all processes.
    """
    if all(len(captions) < 2 for captions in batch.captions):
        return batch
    places = np.arange(first, first + len(batch), dtype=np.uint64)
    key_of_seed, key_of_step = mix64(np.array([[seed % 2**64], [step]], dtype=np.uint64) + GOLDEN)
    draws = mix64(mix64(key_of_seed + key_of_step * GOLDEN) + places * GOLDEN) >> np.uint64(2)
    return dataclasses.replace(batch, draws=torch.from_numpy(draws.astype(np.int64)))


@dataclass(frozen=True)
class EvaluationBatches(Pinning):
    """The batches of one pass over all examples, in order. All ranks have equally many; a share may be empty."""

    source: Source
    transform: Transform
    batch_size: int
    world: int
    rank: int
    captions: bool = True
    raw: bool = False

    def __post_init__(self) -> None:
        check_batch(self.batch_size, self.world, self.rank, even=False)

    def __len__(self) -> int:
        return -(-len(self.source) // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        stop = min((step + 1) * self.batch_size, len(self.source))
        indices = np.arange(step * self.batch_size, stop)[self.rank :: self.world]
        rngs = generators(0, step, indices, _TRANSFORM)
        ready = _read_together(self.source, indices, self.captions)
        return _assemble(self.source, self.transform, indices, ready, rngs, self.captions, None, self.raw)


def _assemble(
    source: Source,
    transform: Transform,
    indices: np.ndarray,
    ready: list[Example] | None,
    rngs: list[np.random.Generator],
    captions: bool,
    replace: Callable[[int], np.ndarray] | None,
    raw: bool,
) -> Batch:
    """Read the examples that are not `ready`, transform and stack them.

    A broken image is replaced by the first readable one of `replace(place)`; without `replace` it is left out.
    """
    broken: list[tuple[str, str]] = []
    rows: list[tuple[int, Example, Plan, np.random.Generator]] = []
    for k, index in enumerate(indices.tolist()):
        candidates = [index]
        for tried, candidate in enumerate(candidates):
            try:
                example, plan = _read(source, transform, candidate, rngs[k], ready[k] if ready and not tried else None)
            except BrokenImage as error:
                broken.append((error.name, error.reason))
                if replace is not None and tried == 0:
                    candidates += replace(k).tolist()
                continue
            rows.append((candidate, example, plan, rngs[k]))
            break
        else:
            if replace is not None:
                raise TooManyBroken(
                    f"{len(candidates)} images in a row cannot be read, the last is {broken[-1][0]} ({broken[-1][1]}): "
                    "repair or remove them."
                )
    return _stack(source, transform, rows, captions, tuple(broken), raw)


def _read_together(source: Source, indices: np.ndarray, captions: bool) -> list[Example] | None:
    read_batch = getattr(source, "read_batch", None)
    return read_batch(indices, captions) if read_batch is not None else None


def _read(
    source: Source, transform: Transform, index: int, rng: np.random.Generator, ready: Example | None
) -> tuple[Example, Plan]:
    """Return the example and its crop, chosen by the stored size if the source tells it, else by the image's."""
    plans: list[Plan] = []

    def min_side(height: int, width: int) -> int:
        plans.append(transform.plan(height, width, rng))
        return plans[0].min_side

    example = source.read(index, min_side) if ready is None else ready
    if not plans:
        plans.append(transform.plan(example.image.shape[0], example.image.shape[1], rng))
    return example, plans[0]


def _stack(
    source: Source, transform: Transform, rows: list, captions: bool, broken: tuple[tuple[str, str], ...], raw: bool
) -> Batch:
    mirrored = None
    if not rows:
        pixels = np.empty((0, *transform.config.size, 3), dtype=np.uint8)
    elif raw:
        pixels, mirrored = transform.apply_raw([r[1].image for r in rows], [r[2] for r in rows], [r[3] for r in rows])
    else:
        pixels = transform.apply_batch([r[1].image for r in rows], [r[2] for r in rows], [r[3] for r in rows])
    examples = [r[1] for r in rows]
    return Batch(
        torch.from_numpy(pixels) if raw else to_tensor(pixels),
        _labels(source, examples),
        torch.tensor([r[0] for r in rows], dtype=torch.int64),
        tuple(e.captions for e in examples) if captions else (),
        broken,
        mirrored=None if mirrored is None else torch.tensor(mirrored),
    )


def _labels(source: Source, examples: list[Example]) -> torch.Tensor:
    count = len(source.classes)
    for example in examples:
        wrong = [label for label in example.labels if not 0 <= label < count]
        if wrong or (count and not source.multi_label and len(example.labels) != 1):
            raise ValueError(
                f"The example {printable(example.name)} has the labels {list(example.labels)}, but expected "
                f"{'some' if source.multi_label else 'one'} of the {count} classes, 0 to {count - 1}."
            )
    if source.multi_label:
        hot = torch.zeros(len(examples), count)
        for row, example in zip(hot, examples, strict=True):
            row[list(example.labels)] = 1.0
        return hot
    return torch.tensor([e.labels[0] if count else -1 for e in examples], dtype=torch.int64)


def mixed(batch: Batch, classes: int) -> Batch:
    """Do the erasing, mixup or cutmix that is still to be done to a batch."""
    images, labels = batch.images, batch.labels
    if batch.erased is not None:
        images = erase(images, batch.erased)
    if batch.blend is not None:
        images, labels = mixup(images, soft_labels(labels, classes), batch.blend)
    if batch.paste is not None:
        images, labels = cutmix(images, soft_labels(labels, classes), batch.paste)
    return dataclasses.replace(batch, images=images, labels=labels, erased=None, blend=None, paste=None)
