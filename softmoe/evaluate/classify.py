"""A classifier at work: accuracy, loss and calibration, counted exactly; and the likeliest classes of images.

Letters: B images, C classes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softmoe.data import Batch, batches_on_device, evaluation_batches, open_source, to_tensor
from softmoe.data.feed import results_on_host
from softmoe.evaluate.api import Evaluate, Predict, as_list
from softmoe.evaluate.features import Progress
from softmoe.evaluate.inputs import (
    FileSource,
    Loaded,
    NewLabels,
    facts_of,
    find_images,
    load,
    match_classes,
    random_subset,
    read_labels,
)
from softmoe.evaluate.mistakes import Mistakes
from softmoe.models.classification import Loss, Totals, probabilities
from softmoe.moe.record import evaluating


class CountAgreement(nn.Module):
    """A model with another one beside it: gives the outputs of the first, and counts where the second agrees."""

    def __init__(self, model: nn.Module, other: nn.Module):
        super().__init__()
        self.model, self.other = model, other
        self.head = getattr(model, "head", None)
        self.same, self.images = 0, 0

    def forward(self, images: Tensor) -> Tensor:
        logits_BC, other_BC = self.model(images), self.other(images)
        self.same += int((logits_BC.argmax(1) == other_BC.argmax(1)).sum())
        self.images += len(images)
        return logits_BC

    def numbers(self) -> dict[str, float]:
        return {"agreement": self.same / max(1, self.images)}


def classification(model: nn.Module, batches: Iterable[Batch], *, loss: Loss = "softmax") -> dict[str, float]:
    """Evaluate a classifier and return named numbers."""
    return count(model, batches, loss=loss).numbers()


def count(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Loss = "softmax",
    see: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> Totals:
    """Run the model over the batches and keep all sums; `see` is shown examples, labels and logits of each."""
    device = next(model.parameters()).device
    totals = Totals(class_count(model), loss)
    with evaluating(model), torch.inference_mode():
        found = ((model(b.images), b.labels, b.indices) for b in batches_on_device(batches, device) if len(b))
        for logits_BC, labels, indices_B in results_on_host(found):
            totals.add(logits_BC, labels)
            if see is not None:
                see(indices_B, labels, logits_BC)
    return totals


def class_count(model: nn.Module) -> int:
    """Return the number of classes the model tells apart."""
    head = getattr(model, "head", None)
    classes = getattr(head, "out_features", None)
    if classes is None:
        raise ValueError("this model has no classification head: fine-tune it, or use `softmoe fewshot`")
    return int(classes)


@dataclass(frozen=True)
class Prediction:
    """The classes and the features of one image."""

    name: str
    top: tuple[tuple[str, float], ...]
    """(class, probability), the likeliest first; empty for a model without a head."""
    features: np.ndarray = field(repr=False)
    """(D,): the vector before the head."""

    def to_dict(self) -> dict[str, Any]:
        return {"image": self.name, "classes": self.classes()}

    def classes(self) -> list[dict[str, Any]]:
        return [{"class": name, "probability": p} for name, p in self.top]


@dataclass(frozen=True)
class Unreadable:
    name: str
    reason: str


class Predictor:
    """A loaded model that says of images what they show: the same for files and for a service."""

    def __init__(self, loaded: Loaded, *, top: int = 5):
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        self.loaded, self.names = loaded, loaded.class_names()
        self.top = min(top, len(self.names))

    def predict(self, names: Sequence[str], images_B3HW: Tensor) -> list[Prediction]:
        """Return one prediction per image; `names` are those of the images."""
        model = self.loaded.model
        with evaluating(model), torch.inference_mode():
            vectors_BD = model.forward_vector(images_B3HW.to(next(model.parameters()).device))
            vectors = vectors_BD.float().cpu()
            tops: list[tuple[tuple[str, float], ...]] = [()] * len(names)
            if self.names:
                weights = next(model.head.parameters())
                logits_BC = model.head(vectors_BD.to(weights.dtype))  # autocast, if any, ended with the vectors
                best = probabilities(logits_BC, self.loaded.loss).cpu().topk(self.top)
                pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                tops = [tuple((self.names[c], p) for p, c in zip(*row, strict=True)) for row in pairs]
        if not vectors.isfinite().all() or any(math.isnan(share) for row in tops for _, share in row):
            raise ValueError("the model's outputs are not finite numbers: its weights are damaged or training diverged")
        return [Prediction(*facts) for facts in zip(names, tops, vectors.numpy(), strict=True)]

    def predict_pixels(self, images: list[bytes]) -> list[Prediction]:
        """Predict images that are (height, width, 3) uint8 of the model's size, as softmoe.data.decoders makes them."""
        size = self.loaded.preprocessing.image_size
        pixels = np.stack([np.frombuffer(image, np.uint8).reshape(*size, 3) for image in images])
        return self.predict([""] * len(images), to_tensor(pixels))

    def predict_files(
        self, paths: Sequence[Path], *, batch_size: int = 64, workers: int = 0
    ) -> Iterator[Prediction | Unreadable]:
        """Yield one result per file, in order within a batch except that unreadable ones follow the batch's others."""
        transform = self.loaded.transform
        for batch in evaluation_batches(FileSource(paths), transform, batch_size, workers=workers):
            if len(batch):
                yield from self.predict([str(paths[index]) for index in batch.indices.tolist()], batch.images)
            yield from (Unreadable(name, reason) for name, reason in batch.broken)


def run_evaluate(options: Evaluate, progress: Progress | None = None) -> dict[str, Any]:
    """Return named numbers and what they were measured on, as plain values for JSON."""
    loaded = load(
        options.model, weights=options.weights, foreign_options=options.foreign_options, **options.model_options
    )
    judged = (
        CountAgreement(
            loaded.model, load(options.model, foreign_options=options.foreign_options, **options.model_options).model
        )
        if options.agreement
        else loaded.model
    )
    outputs = class_count(loaded.model)
    source = random_subset(open_source(options.data, options.split), options.examples)
    if options.labels is None:
        matched, how = match_classes(source, loaded.saved.classes, outputs)
    else:
        matched, how = NewLabels(source, read_labels(options.labels), loaded.class_names()), "file"
    broken: list[tuple[str, str]] = []

    def watched() -> Iterator[Batch]:
        done = 0
        how_made = {"workers": options.workers, "raw": next(loaded.model.parameters()).device.type != "cpu"}
        for batch in evaluation_batches(matched, loaded.transform, options.batch_size, **how_made):
            broken.extend(batch.broken)
            yield batch
            done += len(batch) + len(batch.broken)
            if progress is not None:
                progress(done, len(matched))

    loss = options.loss or loaded.loss
    mistakes = Mistakes(loss)
    totals = count(judged, watched(), loss=loss, see=mistakes.add)
    names = loaded.saved.classes or matched.classes
    return {
        **facts_of(loaded.saved, loaded.preprocessing, {options.data: matched}, split=options.split),
        "weights": options.weights or "as saved",
        "numbers": totals.numbers() | (judged.numbers() if isinstance(judged, CountAgreement) else {}),
        "images": totals.images,
        "unlabeled": totals.unlabeled,
        "unreadable": [{"image": name, "reason": reason} for name, reason in broken],
        "multi_label": matched.multi_label,
        "classes_matched_by": how,
        "classes": totals.class_table(names),
        **mistakes.to_dict(names, matched),
        "calibration": totals.calibration_table(),
    }


def run_predict(options: Predict, progress: Progress | None = None) -> tuple[list[Prediction], list[Unreadable]]:
    """Return classes and features of the images that can be read, and the files that cannot."""
    paths = find_images(as_list(options.images))
    loaded = load(
        options.model, weights=options.weights, foreign_options=options.foreign_options, **options.model_options
    )
    predictor = Predictor(loaded, top=options.top)
    found: list[Prediction | Unreadable] = []
    for result in predictor.predict_files(paths, batch_size=options.batch_size, workers=options.workers):
        found.append(result)
        if progress is not None:
            progress(len(found), len(paths))
    return [p for p in found if isinstance(p, Prediction)], [u for u in found if isinstance(u, Unreadable)]
