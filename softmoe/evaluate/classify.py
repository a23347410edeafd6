"""Accuracy, loss and calibration of a classifier, counted exactly, batch by batch.

Letters: B images, C classes.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from softmoe.data import Batch
from softmoe.models.classification import Loss, Totals
from softmoe.moe.record import evaluating


class Beside(nn.Module):
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


def classification(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Loss = "softmax",
    total: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """The evaluator: model and batches to named numbers. `total` sums a vector over the processes, if several."""
    return count(model, batches, loss=loss, total=total).numbers()


def count(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Loss = "softmax",
    total: Callable[[Tensor], Tensor] | None = None,
) -> Totals:
    """Run the model over the batches and keep all sums."""
    device = next(model.parameters()).device
    totals = Totals(outputs_of(model), loss)
    with evaluating(model), torch.inference_mode():
        for batch in batches:
            if len(batch):
                totals.add(model(batch.images.to(device)), batch.labels)
    if total is not None:
        totals.reduce(total)
    return totals


def outputs_of(model: nn.Module) -> int:
    """Number of classes the model tells apart."""
    head = getattr(model, "head", None)
    classes = getattr(head, "out_features", None)
    if classes is None:
        raise ValueError("this model has no classification head: fine-tune it, or use `softmoe fewshot`")
    return int(classes)
