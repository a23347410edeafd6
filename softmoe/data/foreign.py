"""Data sets in the formats of others: idx:PATH, digits and hf:PATH_OR_NAME.

idx: MNIST-style files (also Fashion-MNIST, EMNIST, KMNIST): PATH/train-images-idx3-ubyte[.gz] and so on.

digits: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. Every fifth is for validation.

hf: a Hugging Face data set: one saved to disk, a folder that `load_dataset` reads, or a name on the hub.
The image, label and caption columns are found by their types and usual names, or are named:
`hf:user/set?image=picture&label=species&config=default`. Images are decoded by us, so reduced-size decoding
applies. The split "val" is the set's `validation`, or its `test` if it has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from softmoe.data.decode import MAX_PIXELS, BrokenImage, decode, read_image_file
from softmoe.data.files import unpacked
from softmoe.data.source import Example, MinSide, Source, count_classes, fingerprint, shortened
from softmoe.paths import home_path
from softmoe.storage.files import check_names, first_line, sha256

_PREFIXES = {"val": ("t10k", "test", "val"), "test": ("t10k", "test")}
_UNSIGNED_BYTE = 8  # the type code in the third byte of the file


class IdxSource(Source):
    """Gray images (n, h, w), or color (n, h, w, 3), and one label each. The files are mapped, not read."""

    multi_label = False

    def __init__(self, images: Path, labels: Path, split: str, classes: int):
        self._images, self._split = images, split
        self.labels = np.array(_mapped(labels))
        if self.labels.ndim != 1 or self._pixels.ndim not in (3, 4) or len(self.labels) != len(self._pixels):
            raise ValueError(
                f"{images.name} has the shape {self._pixels.shape} and {labels.name} {self.labels.shape}; "
                "expected (n, h, w) or (n, h, w, 3) images and (n,) labels."
            )
        height, width, *colors = self._pixels.shape[1:]
        if not 0 < height * width <= MAX_PIXELS or colors not in ([], [3]):
            raise ValueError(
                f"{images.name} holds images of the shape {self._pixels.shape[1:]}; expected (h, w) or (h, w, 3), "
                f"at most {MAX_PIXELS:,} pixels."
            )
        self.classes = tuple(str(i) for i in range(classes))
        self.fingerprint = fingerprint("idx", sha256(images), self.labels.tobytes())

    @cached_property
    def _pixels(self) -> np.ndarray:
        return _mapped(self._images)

    def __getstate__(self) -> dict:
        return {key: value for key, value in vars(self).items() if key != "_pixels"}

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        pixels = np.array(self._pixels[index])
        image = np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels
        return Example(image, (int(self.labels[index]),), name=f"{self._split}/{index}")


def open_idx(path: str, split: str) -> IdxSource:
    folder = home_path(path)
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
    """Map the array of an idx file: two zero bytes, type, number of axes, sizes as big-endian int32, then data."""
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


class DigitsSource(Source):
    """Gray 8 x 8 images as RGB, ten classes."""

    multi_label = False
    classes = tuple("0123456789")

    def __init__(self, split: str, images: np.ndarray, labels: np.ndarray):
        """Make the source of images (n, 8, 8) with values 0..16 and labels (n,)."""
        self._split = split
        self._images = np.repeat(np.round(images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=3)
        self.labels = labels.astype(np.int64)
        self.fingerprint = fingerprint("digits", split, self._images.tobytes(), self.labels.tobytes())

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        return Example(self._images[index], (int(self.labels[index]),), name=f"digits/{self._split}/{index}")


def open_digits(split: str) -> DigitsSource:
    if split not in ("train", "val"):
        raise ValueError(f"digits has the splits train and val, not {split!r}.")
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("The source 'digits' needs scikit-learn: pip install 'softmoe-vit[digits]'.") from error
    data = load_digits()
    chosen = (np.arange(len(data.target)) % 5 == 0) == (split == "val")
    return DigitsSource(split, data.images[chosen], data.target[chosen])


_CAPTIONS = ("captions", "caption", "text", "sentences")
_LABELS = ("label", "labels", "fine_label", "class")
_OTHER_NAMES = {"val": ("val", "validation", "valid", "test")}


class HfSource(Source):
    """Rows of an Arrow-backed data set; its files are mapped, so it is cheap to send to a worker."""

    def __init__(self, rows: Any, name: str, split: str, image: str, label: str | None, caption: str | None):
        features = rows.features
        self._rows, self._name, self._split = rows, name, split
        self._image, self._label, self._caption = image, label, caption
        kind = features[label] if label else None
        self.multi_label = kind is not None and not hasattr(kind, "num_classes") and hasattr(kind, "feature")
        self.classes = tuple(_class_names(rows, label, kind))
        self.fingerprint = fingerprint("hf", name, split, str(rows._fingerprint), image, label or "", caption or "")

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        row = self._rows[int(index)]
        stored = row[self._image]
        name = (stored or {}).get("path") or f"{self._split}/{index}"
        if not isinstance(stored, dict) or not (stored.get("bytes") or stored.get("path")):
            raise BrokenImage(name, "the row has no image")
        data = stored.get("bytes") or read_image_file(Path(stored["path"]), name)
        sentences = _sentences(row[self._caption] if self._caption else ())
        return Example(
            decode(data, name, min_side), _labels(row[self._label] if self._label else None), sentences, name
        )

    def read_captions(self, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
        """Read captions without the images."""
        if self._caption is None:
            return [() for _ in indices]
        rows = self._rows.select_columns([self._caption])[[int(index) for index in indices]]
        return [_sentences(value) for value in rows[self._caption]]


def open_hf(
    path: str, split: str, *, image: str = "", label: str = "", caption: str = "", config: str = ""
) -> HfSource:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("The source 'hf:' needs the package datasets: pip install 'softmoe-vit[hf]'.") from error
    splits = _load(datasets, path, config)
    found = next((name for name in _OTHER_NAMES.get(split, (split,)) if name in splits), None)
    if found is None:
        raise ValueError(f"hf:{path} has no split {split!r}; it has {', '.join(splits)}.")
    rows = splits[found]
    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    column = _column("image", image, rows.features, images[:1])
    if column is None:
        raise ValueError(f"hf:{path} has no image column (it has {', '.join(rows.features)}); add ?image=COLUMN.")
    classes = [name for name, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)]
    label_column = _column("label", label, rows.features, [*classes, *_LABELS])
    caption_column = _column("caption", caption, rows.features, _CAPTIONS)
    rows = rows.cast_column(column, datasets.Image(decode=False))
    keep = {column, label_column, caption_column} - {None}
    return HfSource(rows.select_columns(sorted(keep)), path, found, column, label_column, caption_column)


def _load(datasets: Any, path: str, config: str) -> Any:
    folder = home_path(path)
    try:
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(folder))
        if (folder / "dataset_info.json").is_file():
            return {"train": datasets.load_from_disk(str(folder))}
        return datasets.load_dataset(str(folder) if folder.is_dir() else path, config or None)
    except Exception as error:  # the package raises many kinds, of its own and of the network's
        raise ValueError(f"hf:{path} cannot be opened: {first_line(error)}") from error


def _column(what: str, named: str, features: Any, usual: Any) -> str | None:
    if named and named not in features:
        raise ValueError(f"The data set has no {what} column {named!r}; it has {', '.join(features)}.")
    return named or next((name for name in usual if name in features), None)


def _class_names(rows: Any, label: str | None, kind: Any) -> list[str]:
    if kind is None:
        return []
    inner = getattr(kind, "feature", kind)
    if hasattr(inner, "names"):
        return list(check_names(map(str, inner.names), "this data set"))
    largest = max((max(_labels(value), default=-1) for value in rows[label]), default=-1)
    return [str(i) for i in range(count_classes(largest, len(rows)))]


def _sentences(value: Any) -> tuple[str, ...]:
    sentences = value if isinstance(value, list) else [value]
    return tuple(sentence for sentence in sentences if isinstance(sentence, str))


def _labels(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    try:
        return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
    except (TypeError, ValueError) as error:
        raise ValueError(f"A label must be a class number, or a list of them, not {shortened(value)!r}.") from error
