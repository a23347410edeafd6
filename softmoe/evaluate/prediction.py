"""Images in files -> their likeliest classes and their features, in batches; unreadable files are named and skipped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softmoe.data import evaluation_batches
from softmoe.evaluate.inputs import FileSource, Loaded
from softmoe.moe.record import evaluating


@dataclass(frozen=True)
class Prediction:
    """What the model says of one image."""

    name: str
    top: tuple[tuple[str, float], ...]
    """(class, probability), the likeliest first; empty for a model without a head."""
    features: np.ndarray
    """(D,): the vector before the head."""

    def to_dict(self) -> dict[str, Any]:
        return {"image": self.name, "classes": [{"class": name, "probability": p} for name, p in self.top]}


@dataclass(frozen=True)
class Unreadable:
    name: str
    reason: str


def predict_files(
    loaded: Loaded, paths: Sequence[Path], *, top: int = 5, batch_size: int = 64, workers: int = 0
) -> Iterator[Prediction | Unreadable]:
    """One result per file, in order within a batch except that unreadable ones follow the batch's others."""
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    model, source = loaded.model, FileSource(paths)
    names = loaded.class_names()
    device = next(model.parameters()).device
    for batch in evaluation_batches(source, loaded.transform, batch_size, workers=workers):
        if len(batch):
            with evaluating(model), torch.inference_mode():
                vectors_BD = model.forward_head(model.forward_features(batch.images.to(device)), pre_logits=True)
                shares_BC = model.head(vectors_BD).float().softmax(1).cpu() if names else None
            if not vectors_BD.isfinite().all() or (shares_BC is not None and not shares_BC.isfinite().all()):
                raise ValueError(
                    "the model's outputs are not finite numbers: its weights are damaged or training diverged"
                )
            vectors = vectors_BD.float().cpu().numpy()
            for row, index in enumerate(batch.indices.tolist()):
                best: tuple[tuple[str, float], ...] = ()
                if shares_BC is not None:
                    values, classes = shares_BC[row].topk(min(top, len(names)))
                    best = tuple((names[c], p) for p, c in zip(values.tolist(), classes.tolist(), strict=True))
                yield Prediction(str(paths[index]), best, vectors[row])
        yield from (Unreadable(name, reason) for name, reason in batch.broken)
