"""hf:PATH_OR_NAME - a Hugging Face data set: one saved to disk, a folder that `load_dataset` reads, or a name
on the hub.

The image, label and caption columns are found by their types and usual names, or are named:
`hf:user/set?image=picture&label=species&config=default`. Images are decoded by us, so reduced-size decoding
applies. The split "val" is the set's `validation`, or its `test` if it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softmoe.data.decode import BrokenImage, decode, read_image_file
from softmoe.data.source import Example, MinSide, count_classes, fingerprint, shortened

_CAPTIONS = ("captions", "caption", "text", "sentences")
_LABELS = ("label", "labels", "fine_label", "class")
_OTHER_NAMES = {"val": ("val", "validation", "valid", "test")}


class HfSource:
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

    def __getitem__(self, index: int) -> Example:
        return self.read(index)

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
        """Without the images."""
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
        raise ValueError("The source 'hf:' needs the package datasets: pip install softmoe[hf].") from error
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
    folder = Path(path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(folder))
        if (folder / "dataset_info.json").is_file():
            return {"train": datasets.load_from_disk(str(folder))}
        return datasets.load_dataset(str(folder) if folder.is_dir() else path, config or None)
    except Exception as error:  # the package raises many kinds, of its own and of the network's
        raise ValueError(f"hf:{path} cannot be opened: {str(error).strip().splitlines()[0]}") from error


def _column(what: str, named: str, features: Any, usual: Any) -> str | None:
    if named and named not in features:
        raise ValueError(f"The data set has no {what} column {named!r}; it has {', '.join(features)}.")
    return named or next((name for name in usual if name in features), None)


def _class_names(rows: Any, label: str | None, kind: Any) -> list[str]:
    if kind is None:
        return []
    inner = getattr(kind, "feature", kind)
    if hasattr(inner, "names"):
        return list(inner.names)
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
