"""A linear classifier on frozen features, trained by SGD.

Letters: n images, D features, C classes, R learning rates tried at once.

The learning rate is chosen on a tenth of the training images, never on the test set. All candidates see the same
batches in one product, so trying R of them costs little more than one.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from softmoe.evaluate.features import Features

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_CHUNK = 8192


def linear_probe(
    train: Features,
    test: Features,
    *,
    epochs: int = 30,
    batch_size: int = 256,
    rates: tuple[float, ...] = RATES,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    held_out: float = 0.1,
    seed: int = 0,
) -> dict[str, float]:
    """top1, top5 and loss on the test features, and the learning rate that was chosen on held-out training images."""
    if epochs < 1 or batch_size < 1 or not rates or not 0 < held_out < 1:
        raise ValueError("epochs, batch_size and the number of rates must be at least 1, held_out between 0 and 1")
    labels_n = torch.from_numpy(train.single_labels().copy())
    x_nD = torch.from_numpy(np.array(train.vectors))
    mean_D, std_D = x_nD.mean(0), x_nD.std(0, correction=0) + 1e-5
    x_nD = (x_nD - mean_D) / std_D
    order = np.random.default_rng(seed).permutation(len(x_nD))
    kept = min(len(order) - 1, max(1, round(held_out * len(order))))
    if kept < 1:
        raise ValueError("a linear probe needs at least two training images")
    checked, used = torch.from_numpy(order[:kept]), torch.from_numpy(order[kept:])
    batches = _batches(used, batch_size, epochs, seed)
    steps = epochs * -(-len(used) // batch_size)
    W_RDC, bias_RC = _train(x_nD, labels_n, batches, steps, rates, len(train.classes), momentum, weight_decay)
    held = _measure(x_nD[checked], labels_n[checked], W_RDC, bias_RC)
    best = int((held[:, 0] - held[:, 2] * 1e-9).argmax())  # among equals, the smaller loss
    sums, count = torch.zeros(3, dtype=torch.float64), len(test)
    for start in range(0, count, _CHUNK):
        x_tD = (torch.from_numpy(test.vectors[start : start + _CHUNK].copy()) - mean_D) / std_D
        labels_t = torch.from_numpy(test.single_labels()[start : start + _CHUNK].copy())
        sums += _measure(x_tD, labels_t, W_RDC[best : best + 1], bias_RC[best : best + 1])[0] * len(x_tD)
    top1, top5, loss = (sums / count).tolist()
    return {"top1": top1, "top5": top5, "loss": loss, "rate": rates[best], "held_out_top1": float(held[best, 0])}


def _batches(rows: Tensor, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from rows[torch.randperm(len(rows), generator=generator)].split(batch_size)


def _train(
    x_nD: Tensor,
    labels_n: Tensor,
    batches: Iterator[Tensor],
    steps: int,
    rates: tuple[float, ...],
    classes: int,
    momentum: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor]:
    """Softmax regression from zero, the learning rate falling by a cosine. The gradient is written out: it is short."""
    rate_R11 = torch.tensor(rates)[:, None, None]
    W_RDC = torch.zeros(len(rates), x_nD.shape[1] + 1, classes)
    velocity_RDC = torch.zeros_like(W_RDC)
    for step, rows in enumerate(batches):
        x_bD = F.pad(x_nD[rows], (0, 1), value=1.0)
        wrong_RbC = (x_bD @ W_RDC).softmax(-1)
        wrong_RbC[:, torch.arange(len(rows)), labels_n[rows]] -= 1.0
        gradient_RDC = x_bD.T @ wrong_RbC / len(rows)
        if weight_decay:
            gradient_RDC[:, :-1] += weight_decay * W_RDC[:, :-1]
        velocity_RDC.mul_(momentum).add_(gradient_RDC)
        W_RDC -= rate_R11 * (0.5 + 0.5 * np.cos(np.pi * step / steps)) * velocity_RDC
    return W_RDC[:, :-1], W_RDC[:, -1]


def _measure(x_nD: Tensor, labels_n: Tensor, W_RDC: Tensor, bias_RC: Tensor) -> Tensor:
    """(R, 3): top1, top5 and mean loss of each candidate; one that diverged counts as always wrong."""
    rows = []
    for W_DC, bias_C in zip(W_RDC, bias_RC, strict=True):
        logits_nC = x_nD @ W_DC + bias_C
        if not logits_nC.isfinite().all():
            rows.append([0.0, 0.0, float("inf")])
            continue
        hit_nK = logits_nC.topk(min(5, logits_nC.shape[1])).indices == labels_n[:, None]
        loss = F.cross_entropy(logits_nC, labels_n)
        rows.append([float(hit_nK[:, 0].double().mean()), float(hit_nK.any(1).double().mean()), float(loss)])
    return torch.tensor(rows, dtype=torch.float64)
