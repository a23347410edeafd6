"""Nearest neighbors: no training at all, only distances between features.

Letters: n training images, t test images, D features, C classes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from softmoe.evaluate.features import Features

_CHUNK = 1024  # test rows at a time


def nearest_neighbors(
    train: Features, test: Features, *, neighbors: int = 20, temperature: float | None = 0.07
) -> dict[str, float]:
    """top1 and top5 when the most similar training images (by cosine) vote with weight exp(similarity / temperature).

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
    """(rows, D) of length one, copied: the features themselves are mapped from a file and read-only."""
    return F.normalize(torch.from_numpy(features.vectors[start:stop].copy()), dim=1)
