"""Two towers ready to be asked: texts and whole sources of images as unit vectors.

Letters: n images, t texts, D width of the image tower, E width of the common space.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softmoe.data import Source, Tokenizer, Transform
from softmoe.evaluate.features import Features, extract
from softmoe.evaluate.inputs import evaluation_transform, open_model, preprocessing_at
from softmoe.machine import choose_device
from softmoe.models import TwoTower
from softmoe.moe.record import evaluating
from softmoe.storage import Preprocessing, SavedModel, load_two_tower

_CHUNK = 4096  # features projected at a time


@dataclass(frozen=True)
class Towers:
    """An image tower, a text tower and their tokenizer."""

    model: TwoTower
    tokenizer: Tokenizer
    saved: SavedModel
    preprocessing: Preprocessing

    @property
    def transform(self) -> Transform:
        return evaluation_transform(self.preprocessing)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def embed_texts(self, texts: Sequence[str], batch_size: int = 256) -> Tensor:
        """(t, E) float32, each row of length 1."""
        rows = []
        with evaluating(self.model), torch.inference_mode():
            for start in range(0, len(texts), batch_size):
                tokens = self.tokenizer.encode(texts[start : start + batch_size], self.model.config.text.length)
                rows.append(self.model.embed_texts(tokens.to(self.device)).float().cpu())
        return torch.cat(rows) if rows else torch.zeros(0, self.model.text.projection.out_features)

    def embed_images(self, source: Source, **options: Any) -> tuple[Tensor, Features]:
        """(n, E) float32 of the readable images, and their features, which are kept on disk for the next time.

        `options` are those of `extract`: batch_size, workers, cache, progress.
        """
        features = extract(self.model.image, source, self.transform, **options)
        return self.project(features.vectors), features

    def project(self, vectors_nD: np.ndarray) -> Tensor:
        """Features of the image tower -> (n, E) in the common space."""
        rows = []
        with evaluating(self.model), torch.inference_mode():
            for start in range(0, len(vectors_nD), _CHUNK):
                part = torch.from_numpy(np.array(vectors_nD[start : start + _CHUNK]))
                rows.append(self.model.embed_images(part.to(self.device)).float().cpu())
        return torch.cat(rows)


def load_towers(where: str | Path, *, device: str = "auto", image_size: int | tuple[int, int] | None = None) -> Towers:
    """Of a saved folder, a run or a Hub id; at another resolution if asked."""
    saved = open_model(where)
    model = load_two_tower(saved, choose_device(device))
    assert saved.tokenizer is not None
    tokenizer = Tokenizer(saved.tokenizer.name, saved.tokenizer.data, saved.tokenizer.lower)
    if tokenizer.size != model.config.text.vocab_size:
        raise ValueError(
            f"the tokenizer of {where} has {tokenizer.size} tokens, its text tower {model.config.text.vocab_size}"
        )
    return Towers(model, tokenizer, saved, preprocessing_at(saved, image_size))
