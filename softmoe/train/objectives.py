"""The objectives: functions of a model and a batch that return a loss and named numbers.

For classes there are softmax and sigmoid cross-entropy, for captions (which belongs to which image) the sigmoid loss
(SigLIP, the paper's) and the softmax loss (CLIP). The loop adds the routers' balance losses.

Letters: B images of this process, C classes.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.data import Source, Tokenizer
from softmoe.models import Embeddings
from softmoe.models.classification import LOSSES, class_weights
from softmoe.moe.routing import no_autocast
from softmoe.parallel.reduce import first_row, gather_rows
from softmoe.train.config import ObjectiveSection


class Labeled(Protocol):
    """The part of a batch that a classification objective uses."""

    images: Tensor
    labels: Tensor


Objective = Callable[[nn.Module, Any], tuple[Tensor, dict[str, Tensor]]]
"""A function of a model and a batch that returns the loss, and numbers by name that are logged as objective/NAME.

The logged values are means over steps and processes, so the names must be the same everywhere."""


def make_objective(config: ObjectiveSection, weight_C: Tensor | None = None) -> Objective:
    """Make the objective of classification; `weight_C` are weights of the images by their class.

    Labels are class numbers (B,), or weights of classes (B, C) (multi-label, mixup).
    """
    loss_function = LOSSES[config.loss]

    def objective(model: nn.Module, batch: Labeled) -> tuple[Tensor, dict[str, Tensor]]:
        logits_BC = model(batch.images)
        targets_BC = class_weights(batch.labels, logits_BC.shape[-1], config.label_smoothing)
        losses_B = loss_function(logits_BC, targets_BC)
        if weight_C is not None:
            share_BC = targets_BC / targets_BC.sum(1, keepdim=True).clamp(min=1e-6)
            unused = share_BC.shape[1] - len(weight_C)  # outputs beyond the classes of the data
            losses_B = losses_B * (share_BC @ F.pad(weight_C.to(share_BC), (0, unused), value=1.0))
        return losses_B.mean(), {}

    return objective


def balance_weights(source: Source, power: float, device: torch.device | None = None) -> Tensor | None:
    """Return the weight of an image by its class, (C,), with a mean of 1 over all images; None if all are the same."""
    if not power:
        return None
    labels = getattr(source, "labels", None)
    if labels is None:
        raise ValueError(
            "objective.balance needs the number of images of each class: folders, wds:, idx: and digits have it"
        )
    count_C = torch.from_numpy(np.bincount(labels, minlength=len(source.classes))).double().clamp(min=1)
    weight_C = (count_C.mean() / count_C) ** power
    return (weight_C * count_C.sum() / (weight_C * count_C).sum()).float().to(device)


class Contrastive:
    """The objective of two towers, which compares all pairs of a batch.

    `embed` works on any part of the batch and `join` on the whole, so a large batch can be computed in parts with the
    gradient of the whole (see step.py).
    """

    def __init__(self, config: ObjectiveSection, tokenizer: Tokenizer, length: int):
        self.config, self.tokenizer, self.length = config, tokenizer, length

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return self.join(self.embed(model, batch))

    def embed(self, model: nn.Module, batch: Any) -> Embeddings:
        tokens, device = self.tokens(batch), batch.images.device
        if device.type == "cuda":
            tokens = tokens.pin_memory()  # so that the copy does not block
        return model(batch.images, tokens.to(device, non_blocking=True))

    def join(self, embeddings: Embeddings) -> tuple[Tensor, dict[str, Tensor]]:
        return contrastive_loss(embeddings, self.config.loss), {}

    def tokens(self, batch: Any) -> Tensor:
        """Return the tokens of each caption, (B, length): of several the drawn one, in evaluation the first."""
        draws = [0] * len(batch.captions) if batch.draws is None else batch.draws.tolist()
        texts = [captions[draw % len(captions)] for captions, draw in zip(batch.captions, draws, strict=True)]
        return self.tokenizer.encode(texts, self.length)


def contrastive_loss(e: Embeddings, kind: str, *, alone: bool = False) -> Tensor:
    """Return the loss of this rank's images (and, for softmax, texts) against those of all ranks.

    sigmoid   mean over images i of the sum over texts j of -log sigmoid(+-logit_ij), + where j is i's own
    softmax   mean of the cross-entropies of each image's text and of each text's image

    The mean over the ranks is the loss of the whole batch. `alone` leaves the other ranks out.
    """
    assert e.image is not None
    assert e.text is not None
    texts = e.text if alone else gather_rows(e.text)
    own_B = torch.arange(len(e.image), device=e.image.device) + (0 if alone else first_row(e.image))
    with no_autocast(e.image):
        logits = e.image @ texts.T * e.scale
        if kind == "sigmoid":
            sign = torch.full_like(logits, -1.0).scatter_(1, own_B[:, None], 1.0)
            biased = logits if e.bias is None else logits + e.bias
            return -F.logsigmoid(sign * biased).sum(1).mean()
        images = e.image if alone else gather_rows(e.image)
        of_texts = e.text @ images.T * e.scale
        return 0.5 * (F.cross_entropy(logits, own_B) + F.cross_entropy(of_texts, own_B))


def join_parts(parts: list[Embeddings]) -> Embeddings:
    """Join the embeddings of a batch's parts, detached, as leaves that get gradients."""

    def rows(tensors: list[Tensor | None]) -> Tensor:
        return torch.cat([t for t in tensors if t is not None]).detach().requires_grad_()

    first = parts[0]
    return Embeddings(
        rows([part.image for part in parts]),
        rows([part.text for part in parts]),
        first.scale.detach().requires_grad_(),
        None if first.bias is None else first.bias.detach().requires_grad_(),
    )


def with_gradient(part: Embeddings, whole: Embeddings, start: int) -> Tensor:
    """Return a number whose gradient in the weights is the part's share of that of the loss.

    The loss has left its gradients in `whole`, of which `part` are the rows from `start` on. Scale and bias are counted
    with the first part.
    """
    pairs = [(part.image, whole.image), (part.text, whole.text)]
    total = torch.stack(
        [
            (mine * found.grad[start : start + len(mine)]).sum()
            for mine, found in pairs
            if mine is not None and found is not None and found.grad is not None
        ]
    ).sum()
    if start:
        return total
    for mine, found in ((part.scale, whole.scale), (part.bias, whole.bias)):
        if mine is not None and found is not None and found.grad is not None:
            total = total + mine * found.grad
    return total
