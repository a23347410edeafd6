"""idx:PATH - MNIST-style files (also Fashion-MNIST, EMNIST, KMNIST): PATH/train-images-idx3-ubyte[.gz] and so
on."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import numpy as np

from softmoe.data.decode import MAX_PIXELS
from softmoe.data.files import unpacked
from softmoe.data.source import Example, MinSide, fingerprint

_PREFIXES = {"val": ("t10k", "test", "val"), "test": ("t10k", "test")}
_UNSIGNED_BYTE = 8  # the type code in the third byte of the file


class IdxSource:
    """Gray images (n, h, w), or color (n, h, w, 3), and one label each. The files are mapped, not read."""

    multi_label = False

    def __init__(self, images: Path, labels: Path, split: str, classes: int):
        self._images, self._split = images, split
        self._labels = np.array(_mapped(labels))
        if self._labels.ndim != 1 or self._pixels.ndim not in (3, 4) or len(self._labels) != len(self._pixels):
            raise ValueError(
                f"{images.name} has the shape {self._pixels.shape} and {labels.name} {self._labels.shape}; "
                "expected (n, h, w) or (n, h, w, 3) images and (n,) labels."
            )
        height, width, *colors = self._pixels.shape[1:]
        if not 0 < height * width <= MAX_PIXELS or colors not in ([], [3]):
            raise ValueError(
                f"{images.name} holds images of the shape {self._pixels.shape[1:]}; expected (h, w) or (h, w, 3), "
                f"at most {MAX_PIXELS:,} pixels."
            )
        self.classes = tuple(str(i) for i in range(classes))
        self.fingerprint = fingerprint("idx", list(self._pixels.shape), self._labels.tobytes())

    @cached_property
    def _pixels(self) -> np.ndarray:
        return _mapped(self._images)

    def __getstate__(self) -> dict:
        return {key: value for key, value in vars(self).items() if key != "_pixels"}

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Example:
        pixels = np.array(self._pixels[index])
        image = np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels
        return Example(image, (int(self._labels[index]),), name=f"{self._split}/{index}")

    def read(self, index: int, min_side: MinSide = None) -> Example:
        return self[index]


def open_idx(path: str, split: str) -> IdxSource:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"The folder {folder} does not exist; idx:PATH needs PATH/train-images-idx3-ubyte and its labels."
        )
    prefixes = _PREFIXES.get(split, (split,))
    images, labels = _find(folder, prefixes, "images"), unpacked(_find(folder, prefixes, "labels"))
    trained = unpacked(_find(folder, ("train", *prefixes), "labels"))  # a class may be missing from a small split
    classes = 1 + max(int(_mapped(file).max(initial=0)) for file in (trained, labels))
    return IdxSource(unpacked(images), labels, split, classes)


def _find(folder: Path, prefixes: tuple[str, ...], what: str) -> Path:
    for prefix in prefixes:
        for file in sorted(folder.iterdir()):
            plain = file.name.removesuffix(".gz")
            if plain.startswith(f"{prefix}-{what}") and plain.endswith("ubyte"):
                return file
    raise ValueError(f"{folder} has no file {' or '.join(prefixes)}-{what}-idx*-ubyte (or .gz).")


def _mapped(path: Path) -> np.ndarray:
    """The array in an idx file: two zero bytes, a type, the number of axes, their sizes as big-endian int32,
    then data."""
    with path.open("rb") as file:
        head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _UNSIGNED_BYTE:
        raise ValueError(f"{path} is not an idx file of unsigned bytes.")
    axes = head[3]
    shape = tuple(int(n) for n in np.fromfile(path, dtype=">i4", count=axes, offset=4))
    start = 4 + 4 * axes
    if not 1 <= axes <= 4 or min(shape, default=0) < 1:
        raise ValueError(f"{path} has the shape {shape[:8]}; an idx file of images or labels has one to four axes.")
    if len(shape) < axes or path.stat().st_size < start + math.prod(shape):
        raise ValueError(f"{path} is shorter than its header says, {shape}; download it again.")
    return np.memmap(path, dtype=np.uint8, mode="r", offset=start, shape=shape)
