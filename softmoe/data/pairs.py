"""pairs:PATH - images with their captions beside them: PATH/train/**/photo.jpg and photo.txt, one caption a line.

An image without a .txt has no captions. Bytes that are not UTF-8 are replaced, not refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from softmoe.data.decode import BrokenImage, decode, read_image_file
from softmoe.data.files import Names, file_size
from softmoe.data.folder import IMAGE_SUFFIXES
from softmoe.data.source import Example, MinSide, fingerprint


class PairsSource:
    """Images in the order of their names."""

    classes: tuple[str, ...] = ()
    multi_label = False

    def __init__(self, root: Path, names: Sequence[str]):
        self._root, self._names = root, Names(names)
        sizes = [file_size(self._path(i)) for i in range(len(names))]
        texts = [file_size(self._path(i).with_suffix(".txt")) for i in range(len(names))]
        self.fingerprint = fingerprint("pairs", self._names.blob, sizes, texts)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Example:
        return self.read(index)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        name = self._names[index]
        data = read_image_file(self._path(index), name)
        return Example(decode(data, name, min_side), (), self._captions(index), name)

    def read_captions(self, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
        return [self._captions(int(index)) for index in indices]

    def _captions(self, index: int) -> tuple[str, ...]:
        path = self._path(index).with_suffix(".txt")
        try:
            text = read_image_file(path, path.name)
        except BrokenImage:
            return ()
        return tuple(line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip())

    def _path(self, index: int) -> Path:
        return self._root / self._names[index]


def open_pairs(path: str, split: str) -> PairsSource:
    root = Path(path).expanduser() / split
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; pairs:PATH needs PATH/{split}/photo.jpg and photo.txt beside it.")
    names = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if not names:
        raise ValueError(f"{root} holds no images with one of the endings {' '.join(IMAGE_SUFFIXES)}.")
    return PairsSource(root, names)
