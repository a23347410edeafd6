"""The default evaluators: accuracy and loss on validation batches. Any function of the same form can stand beside
them."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from softmoe.data import Batch
from softmoe.models import Embeddings
from softmoe.train.contrastive import Contrastive, contrastive_loss
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


def match_pairs(model: nn.Module, batches: Iterable[Batch], objective: Contrastive) -> dict[str, float]:
    """Within each batch: the loss, and how often an image's own caption (its first) is the nearest, and the other way
    round (top1 is the mean of both). A tie is a miss."""
    device = next(model.parameters()).device
    sums = {"top1": 0.0, "image_to_text": 0.0, "text_to_image": 0.0, "loss": 0.0}
    pairs = 0
    for batch in batches:
        if not len(batch.images):
            continue
        e: Embeddings = model(batch.images.to(device), objective.tokens(batch).to(device))
        assert e.image is not None
        assert e.text is not None
        cosines_BB = e.image @ e.text.T
        own_B = cosines_BB.diagonal()
        to_text = ((cosines_BB >= own_B[:, None]).sum(1) == 1).sum()
        to_image = ((cosines_BB >= own_B[None, :]).sum(0) == 1).sum()
        sums["image_to_text"] += float(to_text)
        sums["text_to_image"] += float(to_image)
        sums["top1"] += float(to_text + to_image) / 2
        sums["loss"] += float(contrastive_loss(e, objective.config.loss, alone=True)) * len(batch.images)
        pairs += len(batch.images)
    if not pairs:
        raise ValueError("there is nothing to evaluate on: the validation data has no readable image with a caption")
    return {name: value / pairs for name, value in sums.items()}
