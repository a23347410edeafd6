"""The default evaluator: accuracy and loss on validation batches. Any function of the same form can stand beside it."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from softmoe.data import Batch
from softmoe.train.objectives import class_weights, sigmoid_cross_entropy, softmax_cross_entropy

Evaluator = Callable[[nn.Module, Iterable[Batch]], dict[str, float]]
"""A model in evaluation mode and batches (on any device) -> named numbers. No state."""


@torch.no_grad()
def classify(model: nn.Module, batches: Iterable[Batch], loss: str = "softmax") -> dict[str, float]:
    """top1, top5 and mean loss. With several labels per image a prediction counts if it is one of them."""
    device = next(model.parameters()).device
    loss_function = {"softmax": softmax_cross_entropy, "sigmoid": sigmoid_cross_entropy}[loss]
    sums = {"top1": 0.0, "top5": 0.0, "loss": 0.0}
    images = 0
    for batch in batches:
        if not len(batch.images):
            continue
        logits_BC = model(batch.images.to(device))
        targets_BC = class_weights(batch.labels.to(device), logits_BC.shape[-1])
        best_BK = logits_BC.topk(min(5, logits_BC.shape[-1]), dim=-1).indices
        right_BK = targets_BC.gather(-1, best_BK) > 0
        sums["top1"] += float(right_BK[:, 0].sum())
        sums["top5"] += float(right_BK.any(-1).sum())
        sums["loss"] += float(loss_function(logits_BC, targets_BC).sum())
        images += len(batch.images)
    if not images:
        raise ValueError("there is nothing to evaluate on: the validation data has no readable image")
    return {name: value / images for name, value in sums.items()}
