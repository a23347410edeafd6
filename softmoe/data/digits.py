"""digits - scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. Every fifth is for validation."""

from __future__ import annotations

import numpy as np

from softmoe.data.source import Example, MinSide, fingerprint


class DigitsSource:
    """Gray 8 x 8 images as RGB, ten classes."""

    multi_label = False
    classes = tuple("0123456789")

    def __init__(self, split: str, images: np.ndarray, labels: np.ndarray):
        """images (n, 8, 8) of 0..16, labels (n,)."""
        self._split = split
        self._images = np.repeat(np.round(images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=3)
        self._labels = labels.astype(np.int64)
        self.fingerprint = fingerprint("digits", split, self._images.tobytes(), self._labels.tobytes())

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Example:
        return Example(self._images[index], (int(self._labels[index]),), name=f"digits/{self._split}/{index}")

    def read(self, index: int, min_side: MinSide = None) -> Example:
        return self[index]


def open_digits(split: str) -> DigitsSource:
    if split not in ("train", "val"):
        raise ValueError(f"digits has the splits train and val, not {split!r}.")
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("The source 'digits' needs scikit-learn: pip install softmoe[digits].") from error
    data = load_digits()
    chosen = (np.arange(len(data.target)) % 5 == 0) == (split == "val")
    return DigitsSource(split, data.images[chosen], data.target[chosen])
