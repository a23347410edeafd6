"""Encoded images in memory -> answers, for a service: what `predict` says of files, for bytes from strangers."""

import io
import warnings
from dataclasses import dataclass

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from softmoe.data import Example, evaluation_batches
from softmoe.data.decode import decode
from softmoe.data.source import MinSide
from softmoe.evaluate.inputs import Loaded

MAX_PIXELS = 50_000_000
"""A few kilobytes can unpack to gigabytes: images whose header says more than this are not decoded."""


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
        check_header(data, self.max_pixels)
        batch = next(iter(evaluation_batches(OneImage(data), self.transform, 1)))
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

    def __init__(self, data: bytes):
        self.data = data

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Example:
        return self.read(index)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        return Example(decode(self.data, "image", min_side), (), name="image")


def check_header(data: bytes, max_pixels: int) -> None:
    """ValueError unless the header is that of an image of a size one can afford to decode."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our limit is lower than the one Pillow warns of
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        if isinstance(error, Image.DecompressionBombError):
            raise ValueError(f"the image has too many pixels: {max_pixels} are allowed") from error
        raise ValueError("this is not an image in a known format (JPEG, PNG, WebP, ...)") from error
    if width * height > max_pixels:
        raise ValueError(f"the image has too many pixels: {width} x {height}, {max_pixels} are allowed")
