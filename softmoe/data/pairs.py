"""Images with captions beside them: pairs:PATH.

PATH/train/**/photo.jpg and photo.txt, one caption a line. An image without a .txt has no captions; bytes that are not
UTF-8 are replaced, not refused. Without train/ and val/ a tenth is kept for validation (splits.py); where there is
train/ and no val/, `?val=0.1` takes it from train/.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from softmoe.data.decode import BrokenImage, decode, is_uncompressed, read_image_file, some_contents
from softmoe.data.files import IMAGE_SUFFIXES, MAX_TEXT, Names, file_size, is_image_name, report_left_out
from softmoe.data.source import Example, MinSide, Source, fingerprint
from softmoe.data.splits import (
    HELD_OUT,
    check_val_option,
    held_out,
    is_split,
    parse_share,
    report_held_out,
    spelled,
    split_folders,
)
from softmoe.paths import home_path


class PairsSource(Source):
    """Images in the order of their names, each with the captions in the .txt file beside it."""

    classes: tuple[str, ...] = ()
    multi_label = False

    def __init__(self, root: Path, names: Sequence[str]):
        self._root, self._names = root, Names(names)
        sizes = [file_size(self._path(i)) for i in range(len(names))]
        texts = [file_size(self._path(i).with_suffix(".txt")) for i in range(len(names))]
        uncompressed = ((i, size) for i, size in enumerate(sizes) if is_uncompressed(names[i]))
        self.fingerprint = fingerprint(
            "pairs",
            self._names.blob,
            sizes,
            texts,
            *some_contents(self._image_file, uncompressed),
            *some_contents(self._text_file, ((i, size) for i, size in enumerate(texts) if size >= 0)),
        )

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        name = self._names[index]
        return Example(decode(self._image_file(index), name, min_side), (), self._captions(index), name)

    def read_captions(self, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
        return [self._captions(int(index)) for index in indices]

    def _captions(self, index: int) -> tuple[str, ...]:
        try:
            text = self._text_file(index)
        except BrokenImage:
            return ()
        return tuple(line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip())

    def _image_file(self, index: int) -> bytes:
        return read_image_file(self._path(index), self._names[index])

    def _text_file(self, index: int) -> bytes:
        path = self._path(index).with_suffix(".txt")
        return read_image_file(path, path.name, MAX_TEXT)

    def _path(self, index: int) -> Path:
        return self._root / self._names[index]


def open_pairs(path: str, split: str, *, val: str | None = None) -> PairsSource:
    above = home_path(path)
    here = split_folders(above, split) if above.is_dir() else {split}
    from_train = bool(here) and val is not None and split in ("train", "val")
    if from_train:
        check_val_option(here, above)
    root = above / spelled(here, "train" if from_train else split) if here else above
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; pairs:PATH needs PATH/{split}/photo.jpg and photo.txt beside it.")
    files = list(root.rglob("*"))
    report_left_out(root, (p.name for p in files))
    names = sorted(p.relative_to(root).as_posix() for p in files if is_image_name(p.name))
    if not names:
        raise ValueError(f"{root} holds no images with one of the endings {' '.join(IMAGE_SUFFIXES)}.")
    if from_train or not (here or is_split(above)):
        share, every = HELD_OUT if val is None else parse_share(val), {"": [(name,) for name in names]}
        found = held_out(every, split, share, root)
        if not from_train:
            report_held_out(root, found, every, split, share)
        names = [name for (name,) in found[""]]
    return PairsSource(root, names)
