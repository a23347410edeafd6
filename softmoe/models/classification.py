"""The losses and the accuracies of classification, defined once for training and evaluation.

Letters: B images, C classes.

All counts are sums over images: batches may have any size, and the sums of several processes add up. With several
labels per image (ReaL, JFT) a prediction is right if it is one of them; images without a label are left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from softmoe.moe.routing import routing_dtype

Loss = Literal["softmax", "sigmoid"]
BINS = 15
"""The number of equal bins of confidence in which calibration is measured, as is usual."""


def softmax_cross_entropy(logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
    """Return the cross-entropy of each image, (B,): minus the sum of targets times log-probabilities."""
    return -(targets_BC * wide(logits_BC).log_softmax(-1)).sum(-1)


def sigmoid_cross_entropy(logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
    """Return the sum over classes (not the mean) of each image's binary cross-entropies, (B,)."""
    return F.binary_cross_entropy_with_logits(wide(logits_BC), targets_BC, reduction="none").sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": softmax_cross_entropy,
    "sigmoid": sigmoid_cross_entropy,
}


def probabilities(logits_BC: Tensor, loss: Loss) -> Tensor:
    """Return what a model that was trained with this loss gives each class: shares of 1, or each a chance by itself."""
    return wide(logits_BC).sigmoid() if loss == "sigmoid" else wide(logits_BC).softmax(-1)


def class_weights(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Return (B, C) targets for (B,) class numbers or (B, C) weights, smoothed towards the uniform distribution."""
    check_labels(labels, classes)
    if labels.ndim == 1:
        targets_BC = F.one_hot(labels.long(), classes).to(torch.get_default_dtype())
    else:
        targets_BC = labels if labels.is_floating_point() else labels.to(torch.get_default_dtype())
    return targets_BC * (1.0 - smoothing) + smoothing / classes if smoothing else targets_BC


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise ValueError for labels that the model's head has no output for."""
    if labels.ndim == 2:
        if labels.shape[1] != classes:
            raise ValueError(f"labels have {labels.shape[1]} classes, but the model's head has {classes}")
        return
    if labels.device.type != "cpu" or not len(labels):  # reading from a GPU would wait for it, and loaders checked
        return
    low, high = labels.aminmax()
    if low < 0 or high >= classes:
        wrong = int(high) if high >= classes else int(low)
        raise ValueError(
            f"label {wrong} is outside the model's head, which has {classes} classes (0 to {classes - 1}): "
            "set model.num_classes, or correct the labels"
        )


def wide(logits: Tensor) -> Tensor:
    """Return the logits in float32 at least, in which losses are computed also under autocast."""
    return logits.to(routing_dtype(logits.dtype))


@dataclass
class Totals:
    """Sums over images: `add` batches, then read `numbers`. The sums of several processes add up."""

    classes: int
    loss: Loss = "softmax"
    sums: Tensor = field(init=False)
    """Images, top-1 right, top-5 right, loss, images without a label."""
    by_class: Tensor = field(init=False)
    """(3, C): images with this label, those of them predicted right, predictions of this class."""
    by_bin: Tensor = field(init=False)
    """(3, BINS): images with this confidence, sum of their confidences, right predictions."""

    def __post_init__(self) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64)
        self.by_class = torch.zeros(3, self.classes, dtype=torch.float64)
        self.by_bin = torch.zeros(3, BINS, dtype=torch.float64)

    def add(self, logits_BC: Tensor, labels: Tensor) -> None:
        """Count a batch. Labels are (B,) class numbers, or (B, C) with 1 where a class applies."""
        logits_BC = wide(logits_BC.to("cpu"))
        if not logits_BC.isfinite().all():
            raise ValueError("the model's outputs are not finite numbers: its weights are damaged or training diverged")
        targets_BC = class_weights(labels.to("cpu"), self.classes)
        labeled_B = targets_BC.sum(1) > 0
        self.sums[4] += len(labeled_B) - labeled_B.sum()
        if not labeled_B.all():
            logits_BC, targets_BC = logits_BC[labeled_B], targets_BC[labeled_B]
        if not len(logits_BC):
            return
        order_BK = logits_BC.topk(min(5, self.classes)).indices
        right_BK = targets_BC.gather(1, order_BK) > 0
        predicted_B, right_B = order_BK[:, 0], right_BK[:, 0].double()
        losses_B = LOSSES[self.loss](logits_BC, targets_BC).double()
        found = (torch.tensor(float(len(right_B))), right_B.sum(), right_BK.any(1).sum(), losses_B.sum())
        self.sums[:4] += torch.stack([value.double() for value in found])
        self.by_class[0] += targets_BC.double().sum(0)
        self.by_class[1].scatter_add_(0, predicted_B, right_B)
        self.by_class[2].scatter_add_(0, predicted_B, torch.ones_like(right_B))
        self._add_confidence(logits_BC, right_B)

    def _add_confidence(self, logits_BC: Tensor, right_B: Tensor) -> None:
        confidence_B = probabilities(logits_BC, self.loss).amax(1).double()
        bin_B = (confidence_B * BINS).long().clamp(max=BINS - 1)
        for row, values_B in zip(self.by_bin, (torch.ones_like(right_B), confidence_B, right_B), strict=True):
            row.scatter_add_(0, bin_B, values_B)

    @property
    def images(self) -> int:
        return int(self.sums[0])

    @property
    def unlabeled(self) -> int:
        return int(self.sums[4])

    def numbers(self) -> dict[str, float]:
        """Return accuracies, loss, mean accuracy over classes, expected calibration error and mean confidence."""
        if not self.images:
            raise ValueError("there is nothing to evaluate on: no image could be read, or none has a label")
        top1, top5, loss = (self.sums[1:4] / self.sums[0]).tolist()
        present = self.by_class[0] > 0
        per_class = (self.by_class[1] / self.by_class[0])[present].mean().item()
        count, confidence, right = self.by_bin
        return {
            "top1": top1,
            "top5": top5,
            "loss": loss,
            "class_mean": per_class,
            "calibration_error": ((confidence - right).abs().sum() / count.sum()).item(),
            "confidence": (confidence.sum() / count.sum()).item(),
        }

    def class_table(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Return a row per class: its images, those of them predicted right, and the predictions of it."""
        rows = zip(names, *self.by_class.long().tolist(), strict=True)
        return [
            {"class": name, "images": images, "right": right, "predicted": predicted}
            for name, images, right, predicted in rows
        ]

    def calibration_table(self) -> list[dict[str, float]]:
        """Return a row per bin of confidence that holds images."""
        rows = zip(*self.by_bin.tolist(), strict=True)
        return [
            {"from": i / BINS, "to": (i + 1) / BINS, "images": int(n), "confidence": c / n, "accuracy": right / n}
            for i, (n, c, right) in enumerate(rows)
            if n
        ]
