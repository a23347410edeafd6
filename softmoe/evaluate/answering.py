"""Encoded images in memory -> answers, for a service: what `predict` says of files, for bytes from strangers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from softmoe.data import Example, evaluation_batches
from softmoe.data.decode import MAX_PIXELS, decode
from softmoe.data.source import MinSide
from softmoe.evaluate.inputs import Loaded


@dataclass(frozen=True)
class Answer:
    classes: tuple[tuple[str, float], ...]
    """(class, probability), the likeliest first; empty for a model without a head."""
    embedding: tuple[float, ...]
    """The vector before the head."""


class Answers:
    """`read` turns bytes into the model's input, `ask` a batch of inputs into answers."""

    def __init__(self, loaded: Loaded, *, top: int = 5, max_pixels: int = MAX_PIXELS):
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        self.model, self.transform = loaded.model, loaded.transform
        self.names = loaded.class_names()
        self.top = min(top, len(self.names))
        self.max_pixels = max_pixels
        self.device = next(loaded.model.parameters()).device

    def read(self, data: bytes) -> Tensor:
        """(3, height, width), made as `predict` makes it. ValueError with the reason for what is not an image."""
        batch = next(iter(evaluation_batches(OneImage(data, self.max_pixels), self.transform, 1)))
        if batch.broken:
            raise ValueError(f"the image cannot be read: {batch.broken[0][1]}")
        return batch.images[0]

    def ask(self, images: list[Tensor]) -> list[Answer]:
        with torch.inference_mode():
            tokens_BMD = self.model.forward_features(torch.stack(images).to(self.device))
            vectors_BD = self.model.forward_head(tokens_BMD, pre_logits=True)
            vectors = vectors_BD.float().cpu().tolist()
            if not self.names:
                return [Answer((), tuple(vector)) for vector in vectors]
            best = self.model.head(vectors_BD).float().softmax(1).cpu().topk(self.top)
        answers = []
        for vector, values, indices in zip(vectors, best.values.tolist(), best.indices.tolist(), strict=True):
            named = tuple((self.names[c], p) for p, c in zip(values, indices, strict=True))
            answers.append(Answer(named, tuple(vector)))
        return answers


class OneImage:
    """A source of one example, from memory."""

    classes: tuple[str, ...] = ()
    multi_label = False
    fingerprint = "memory"

    def __init__(self, data: bytes, max_pixels: int = MAX_PIXELS):
        self.data, self.max_pixels = data, max_pixels

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Example:
        return self.read(index)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        return Example(decode(self.data, "image", min_side, self.max_pixels), (), name="image")
