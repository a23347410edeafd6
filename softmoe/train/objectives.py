"""An objective turns a batch and a model into a loss and named numbers. The loop adds the routers' balance losses.

Letters: B images, C classes.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.train.config import ObjectiveSection


class Labeled(Protocol):
    """The part of a data batch that an objective looks at."""

    images: Tensor
    labels: Tensor


Objective = Callable[[nn.Module, Any], tuple[Tensor, dict[str, Tensor]]]


def make_objective(config: ObjectiveSection) -> Objective:
    """Classification: labels are class numbers (B,), or weights per class (B, C) (multi-label, mixup)."""
    loss_function = {"softmax": softmax_cross_entropy, "sigmoid": sigmoid_cross_entropy}[config.loss]

    def objective(model: nn.Module, batch: Labeled) -> tuple[Tensor, dict[str, Tensor]]:
        logits_BC = model(batch.images)
        targets_BC = class_weights(batch.labels, logits_BC.shape[-1], config.label_smoothing)
        loss = loss_function(logits_BC, targets_BC).mean()
        return loss, {}

    return objective


def softmax_cross_entropy(logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
    """(B,): minus the targets' share of the log-probabilities."""
    return -(targets_BC * wide(logits_BC).log_softmax(-1)).sum(-1)


def sigmoid_cross_entropy(logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
    """(B,): each class a yes-no question of its own; the sum over the classes, not their mean."""
    return F.binary_cross_entropy_with_logits(wide(logits_BC), targets_BC, reduction="none").sum(-1)


def class_weights(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """(B,) class numbers or (B, C) weights -> (B, C) float targets, smoothed towards the uniform distribution."""
    check_labels(labels, classes)
    if labels.ndim == 1:
        targets_BC = F.one_hot(labels.long(), classes).to(torch.get_default_dtype())
    else:
        targets_BC = labels if labels.is_floating_point() else labels.to(torch.get_default_dtype())
    return targets_BC * (1.0 - smoothing) + smoothing / classes if smoothing else targets_BC


def check_labels(labels: Tensor, classes: int) -> None:
    if labels.ndim == 2:
        if labels.shape[1] != classes:
            raise ValueError(f"labels have {labels.shape[1]} classes, but the model's head has {classes}")
        return
    low, high = labels.aminmax()
    if labels.device.type != "meta" and (low < 0 or high >= classes):
        wrong = int(high) if high >= classes else int(low)
        raise ValueError(
            f"label {wrong} is outside the model's head, which has {classes} classes (0 to {classes - 1}): "
            "set model.num_classes, or correct the labels"
        )


def wide(logits: Tensor) -> Tensor:
    """Losses are computed in float32 at least, also under autocast."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
