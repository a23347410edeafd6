"""An objective turns a batch and a model into a loss and named numbers. The loop adds the routers' balance losses.

For classes: softmax or sigmoid cross-entropy. For captions (which belongs to which image): the sigmoid loss (SigLIP,
the paper's) and the softmax loss (CLIP).

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
    """The part of a data batch that an objective looks at."""

    images: Tensor
    labels: Tensor


Objective = Callable[[nn.Module, Any], tuple[Tensor, dict[str, Tensor]]]
"""A model and a batch -> the loss, and numbers by name whose means over steps and processes are logged as
objective/NAME. The names are the same at every step and on every process."""


def make_objective(config: ObjectiveSection, weight_C: Tensor | None = None) -> Objective:
    """Classification: labels are class numbers (B,), or weights per class (B, C) (multi-label, mixup). `weight_C` is
    what an image of each class counts."""
    loss_function = LOSSES[config.loss]

    def objective(model: nn.Module, batch: Labeled) -> tuple[Tensor, dict[str, Tensor]]:
        logits_BC = model(batch.images)
        targets_BC = class_weights(batch.labels, logits_BC.shape[-1], config.label_smoothing)
        losses_B = loss_function(logits_BC, targets_BC)
        if weight_C is not None:
            share_BC = targets_BC / targets_BC.sum(1, keepdim=True).clamp(min=1e-6)
            losses_B = losses_B * (share_BC @ weight_C.to(share_BC))
        return losses_B.mean(), {}

    return objective


def balance_weights(source: Source, power: float, device: torch.device | None = None) -> Tensor | None:
    """(C,) on the device: what an image of each class counts, 1 in the mean over all images; None where all count the
    same."""
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
    """The objective of two towers. It looks at all pairs of a batch together: `embed` works on any part of the batch,
    `join` on the whole, so a large batch can be computed in parts with the gradient of the whole (see step.py)."""

    def __init__(self, config: ObjectiveSection, tokenizer: Tokenizer, length: int):
        self.config, self.tokenizer, self.length = config, tokenizer, length

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return self.join(self.embed(model, batch))

    def embed(self, model: nn.Module, batch: Any) -> Embeddings:
        tokens, device = self.tokens(batch), batch.images.device
        if device.type == "cuda":
            tokens = tokens.pin_memory()  # so that the copy is not waited for
        return model(batch.images, tokens.to(device, non_blocking=True))

    def join(self, embeddings: Embeddings) -> tuple[Tensor, dict[str, Tensor]]:
        return contrastive_loss(embeddings, self.config.loss), {}

    def tokens(self, batch: Any) -> Tensor:
        """(B, length): of several captions the one that was drawn, in evaluation the first."""
        draws = [0] * len(batch.captions) if batch.draws is None else batch.draws.tolist()
        texts = [captions[draw % len(captions)] for captions, draw in zip(batch.captions, draws, strict=True)]
        return self.tokenizer.encode(texts, self.length)


def contrastive_loss(e: Embeddings, kind: str, *, alone: bool = False) -> Tensor:
    """Compares this rank's images (and, for softmax, texts) with those of all ranks; the mean over the ranks is the
    loss of the whole batch. `alone` leaves the other ranks out.

    sigmoid   mean over images i of the sum over texts j of -log sigmoid(+-logit_ij), + where j is i's own
    softmax   mean of the cross-entropies of each image's text and of each text's image
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
    """The embeddings of a batch from those of its parts, as numbers to be differentiated by."""

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
    """A number whose gradient, in the weights behind `part` (rows from `start` on), is that of the loss which left its
    gradients in `whole`. Scale and bias are counted with the first part."""
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
