"""Images in memory -> answers, for a service: what `predict` says of files."""

from dataclasses import dataclass

import numpy as np
import torch

from softmoe.data import to_tensor
from softmoe.evaluate.inputs import Loaded


@dataclass(frozen=True)
class Answer:
    """The classes and the embedding of one image."""

    classes: tuple[tuple[str, float], ...]
    """(class, probability), the likeliest first; empty for a model without a head."""
    embedding: tuple[float, ...]
    """The vector before the head."""


class Answers:
    """`ask` turns a batch of images into answers."""

    def __init__(self, loaded: Loaded, *, top: int = 5):
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        self.model, self.size = loaded.model, loaded.preprocessing.image_size
        self.names = loaded.class_names()
        self.top = min(top, len(self.names))
        self.device = next(loaded.model.parameters()).device

    def ask(self, images: list[bytes]) -> list[Answer]:
        """`images` are (height, width, 3) uint8 of the model's size, as softmoe.data.decoders makes them."""
        pixels = np.stack([np.frombuffer(image, np.uint8).reshape(*self.size, 3) for image in images])
        with torch.inference_mode():
            tokens_BMD = self.model.forward_features(to_tensor(pixels).to(self.device))
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
