"""Measure how well frozen features tell classes apart.

By few-shot accuracy (its mathematics is in ridge.py), votes of the nearest neighbors, and a linear classifier trained
by SGD.

Letters: n training images, t test images, D features, C classes, R learning rates tried at once.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.data import Batch, Source, open_splits
from softmoe.evaluate.api import FewShot, as_list
from softmoe.evaluate.features import Features, Progress, extract
from softmoe.evaluate.inputs import evaluation_transform, facts_of, load, random_subset
from softmoe.evaluate.ridge import few_shot
from softmoe.models import VisionTransformer
from softmoe.storage import Preprocessing

_CHUNK = 1024  # test rows at a time


def nearest_neighbors(
    train: Features, test: Features, *, neighbors: int = 20, temperature: float | None = 0.07
) -> dict[str, float]:
    """Return top1 and top5 of a vote of the most similar training images (by cosine).

    A vote has the weight exp(similarity / temperature).
    `temperature=None` gives every neighbor one vote; ties go to the lower class.
    """
    if neighbors < 1:
        raise ValueError(f"neighbors must be at least 1, got {neighbors}")
    classes = len(train.classes)
    labels_n = torch.from_numpy(train.single_labels())
    labels_t = torch.from_numpy(test.single_labels())
    train_nD = unit_rows(train)
    right = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(test), _CHUNK):
        similarity_tn = unit_rows(test, start, start + _CHUNK) @ train_nD.T
        nearest_tk, which_tk = similarity_tn.topk(min(neighbors, len(train)))
        weight_tk = torch.ones_like(nearest_tk) if temperature is None else (nearest_tk / temperature).exp()
        votes_tC = torch.zeros(len(nearest_tk), classes).scatter_add_(1, labels_n[which_tk], weight_tk)
        order_tC = votes_tC.sort(dim=1, descending=True, stable=True).indices
        hit_tC = order_tC == labels_t[start : start + _CHUNK, None]
        right += torch.stack([hit_tC[:, 0].sum(), hit_tC[:, :5].sum()]).double()
    top1, top5 = (right / len(test)).tolist()
    return {"top1": top1, "top5": top5}


def unit_rows(features: Features, start: int = 0, stop: int | None = None) -> Tensor:
    """Return rows (rows, D) of length one, copied: the features themselves are mapped from a file and read-only."""
    return F.normalize(torch.from_numpy(features.vectors[start:stop].copy()), dim=1)


RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_MOMENTUM, _HELD_OUT = 0.9, 0.1
_PROBED = 8192  # test rows at a time


def linear_probe(
    train: Features,
    test: Features,
    *,
    epochs: int = 30,
    batch_size: int = 256,
    rates: tuple[float, ...] = RATES,
    seed: int = 0,
) -> dict[str, float]:
    """Train a linear classifier and return its top1, top5 and loss on the test features, and its learning rate.

    The rate is chosen on a tenth of the training images, never on the test set. All candidates see the same batches
    in one product, so trying several costs little more than one.
    """
    if epochs < 1 or batch_size < 1 or not rates:
        raise ValueError("epochs, batch_size and the number of rates must be at least 1")
    labels_n = torch.from_numpy(train.single_labels().copy())
    x_nD = torch.from_numpy(np.array(train.vectors))
    mean_D, std_D = x_nD.mean(0), x_nD.std(0, correction=0) + 1e-5
    x_nD = (x_nD - mean_D) / std_D
    order = np.random.default_rng(seed).permutation(len(x_nD))
    kept = min(len(order) - 1, max(1, round(_HELD_OUT * len(order))))
    if kept < 1:
        raise ValueError("a linear probe needs at least two training images")
    checked, used = torch.from_numpy(order[:kept]), torch.from_numpy(order[kept:])
    batches = _batches(used, batch_size, epochs, seed)
    steps = epochs * -(-len(used) // batch_size)
    W_RDC, bias_RC = _train(x_nD, labels_n, batches, steps, rates, len(train.classes))
    held = _measure(x_nD[checked], labels_n[checked], W_RDC, bias_RC)
    best = int((held[:, 0] - held[:, 2] * 1e-9).argmax())  # among equals, the smaller loss
    sums, count = torch.zeros(3, dtype=torch.float64), len(test)
    for start in range(0, count, _PROBED):
        x_tD = (torch.from_numpy(test.vectors[start : start + _PROBED].copy()) - mean_D) / std_D
        labels_t = torch.from_numpy(test.single_labels()[start : start + _PROBED].copy())
        sums += _measure(x_tD, labels_t, W_RDC[best : best + 1], bias_RC[best : best + 1])[0] * len(x_tD)
    top1, top5, loss = (sums / count).tolist()
    return {"top1": top1, "top5": top5, "loss": loss, "rate": rates[best], "held_out_top1": float(held[best, 0])}


def _batches(rows: Tensor, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from rows[torch.randperm(len(rows), generator=generator)].split(batch_size)


def _train(
    x_nD: Tensor, labels_n: Tensor, batches: Iterator[Tensor], steps: int, rates: tuple[float, ...], classes: int
) -> tuple[Tensor, Tensor]:
    """Train softmax regression from zero, with a cosine learning rate and the gradient written out."""
    rate_R11 = torch.tensor(rates)[:, None, None]
    W_RDC = torch.zeros(len(rates), x_nD.shape[1] + 1, classes)
    velocity_RDC = torch.zeros_like(W_RDC)
    for step, rows in enumerate(batches):
        x_bD = F.pad(x_nD[rows], (0, 1), value=1.0)
        wrong_RbC = (x_bD @ W_RDC).softmax(-1)
        wrong_RbC[:, torch.arange(len(rows)), labels_n[rows]] -= 1.0
        gradient_RDC = x_bD.T @ wrong_RbC / len(rows)
        velocity_RDC.mul_(_MOMENTUM).add_(gradient_RDC)
        W_RDC -= rate_R11 * (0.5 + 0.5 * np.cos(np.pi * step / steps)) * velocity_RDC
    return W_RDC[:, :-1], W_RDC[:, -1]


def _measure(x_nD: Tensor, labels_n: Tensor, W_RDC: Tensor, bias_RC: Tensor) -> Tensor:
    """Return top1, top5 and mean loss of each candidate, (R, 3); one that diverged counts as always wrong."""
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


def run_fewshot(options: FewShot, progress: Progress | None = None) -> dict[str, Any]:
    """Return accuracies by data and number of shots; nearest neighbors and a probe if asked."""
    if not as_list(options.data):
        raise ValueError("give at least one source of images: softmoe fewshot MODEL DATA")
    loaded = load(options.model, foreign_options=options.foreign_options, **options.model_options)
    sources = {name: _parts(options, name) for name in as_list(options.data)}

    def features(source: Source) -> Features:
        return extract(loaded.model, source, loaded.transform, **options.feature_options(progress))

    pairs = {name: (features(train), features(test)) for name, (train, test) in sources.items()}
    found = few_shot(pairs, shots=options.shots, seeds=options.seeds, protocol=options.protocol)
    report = {
        **facts_of(
            loaded.saved,
            loaded.preprocessing,
            {name: pair[1] for name, pair in sources.items()},
            split=options.test_split,
        ),
        "train_data": {name: pair[0].fingerprint for name, pair in sources.items()},
        "images": {name: {"train": len(train), "test": len(test)} for name, (train, test) in pairs.items()},
        "fewshot": found.to_dict(),
    }
    if options.knn:
        report["knn"] = {name: nearest_neighbors(*pair) for name, pair in pairs.items()}
    if options.linear:
        report["linear_probe"] = {name: linear_probe(*pair) for name, pair in pairs.items()}
    return report


def _parts(options: FewShot, name: str) -> tuple[Source, Source]:
    """Open the training and the test images of a source; to train, of one without end four times the shots."""
    train, test = open_splits(name, options.train_split, options.test_split)
    examples = options.train_examples
    if examples is None and getattr(train, "generated", False):
        examples = 4 * max(options.shots) * len(train.classes)
    return random_subset(train, examples), random_subset(test, options.test_examples)


def fewshot_evaluator(
    data: str, preprocessing: Preprocessing
) -> Callable[[nn.Module, Iterable[Batch]], dict[str, float]]:
    """Return an evaluator for the training loop: the accuracy of 10 images a class on the model's features.

    It looks at its own data, at most 5,000 training and 2,000 test images, always the same, and not at the batches.
    """
    train, test = map(random_subset, open_splits(data, "train", "val"), (5000, 2000))
    transform = evaluation_transform(preprocessing)

    def evaluator(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        if not isinstance(model, VisionTransformer):
            raise ValueError(
                "evaluation.fewshot works in one process; evaluate checkpoints with softmoe fewshot instead"
            )
        features = [extract(model, source, transform, cache=False) for source in (train, test)]
        found = few_shot({"data": (features[0], features[1])}, shots=(10,), seeds=1)
        return {"10shot": found.accuracies["data"][10][0]}

    return evaluator
