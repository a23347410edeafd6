"""Images in folders: with a class each (folder:PATH) or with captions beside them (pairs:PATH).

folder:PATH    PATH/train/<class>/*.jpg, PATH/val/<class>/*.jpg, optional PATH/classes.json {"<class>": "its name"};
               or a tar or tar.gz of that. The folder names of `train`, sorted, are the labels of every split
pairs:PATH     PATH/train/**/photo.jpg and photo.txt, one caption a line. An image without a .txt has no captions;
               bytes that are not UTF-8 are replaced, not refused
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from softmoe.data.decode import BrokenImage, decode, read_image_file, read_member
from softmoe.data.files import ByteReader, Names, file_size, parse_json, read_json, tar_members, unpacked
from softmoe.data.source import Example, MinSide, Source, fingerprint, speakable

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")


class FolderSource(Source):
    """Images whose class is the name of their folder."""

    multi_label = False

    def __init__(self, root: Path, split: str, classes: list[str], titles: dict[str, str], found: dict[str, list]):
        """`found`: class -> [(name within the split, offset, size)]; `root` is a folder, or a tar read by offset."""
        ids = {name: i for i, name in enumerate(classes)}
        rows = [(ids[c], f"{c}/{name}", offset, size) for c in classes for name, offset, size in found.get(c, [])]
        self.classes = tuple(titles.get(c, c) for c in classes)
        self._root, self._split = root, split
        self._tar = ByteReader(root) if root.is_file() else None
        self._labels = np.array([r[0] for r in rows], dtype=np.int32)
        self._names = Names(r[1] for r in rows)
        self._offsets = np.array([r[2] for r in rows], dtype=np.int64)
        self._sizes = np.array([r[3] for r in rows], dtype=np.int64)
        self.fingerprint = fingerprint(
            "folder",
            json.dumps([classes, self.classes]),
            self._names.blob,
            self._sizes.tobytes(),
            self._labels.tobytes(),
        )

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        name = f"{self._split}/{self._names[index]}"
        if self._tar is not None:
            data = read_member(self._tar, int(self._offsets[index]), int(self._sizes[index]), name)
        else:
            data = read_image_file(self._root / name, name)
        return Example(decode(data, name, min_side), (int(self._labels[index]),), name=name)


def open_folder(path: str, split: str) -> FolderSource:
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"The data folder {root} does not exist; folder:PATH needs PATH/{split}/<class>/<image>.")
    if root.is_file():
        if not root.name.endswith(_TAR_SUFFIXES):
            raise ValueError(f"folder: needs a folder, a .tar or a .tar.gz, but {root} is neither.")
        tree, titles, stored = _scan_tar(unpacked(root))
    else:
        stored = root
        tree = {s: _scan_split(root / s) for s in ("train", split) if (root / s).is_dir()}
        titles = _read_titles(root)
    found = _checked_split(root, tree, split)
    classes = list(speakable(sorted(tree.get("train", found)), str(root)))
    strangers = sorted(set(found) - set(classes))
    if strangers:
        raise ValueError(
            f"{root}/{split} has the class {strangers[0]!r} ({len(strangers)} such), not in {root}/train; "
            "every class to be scored must be one that is trained."
        )
    return FolderSource(stored, split, classes, titles, found)


def _checked_split(root: Path, tree: dict[str, dict[str, list]], split: str) -> dict[str, list]:
    if split not in tree:
        there = sorted(tree) or sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else sorted(tree)
        raise ValueError(
            f"{root} has no folder {split!r} (it has {', '.join(there[:8]) or 'no folders'}); "
            f"folder:PATH needs PATH/{split}/<class>/<image>."
        )
    found = tree[split]
    empty = sorted(c for c, files in found.items() if not files)
    if not found or len(empty) == len(found):
        raise ValueError(
            f"{root}/{split} holds no images in class folders; put them at {split}/<class>/<image>, "
            f"with one of the endings {' '.join(IMAGE_SUFFIXES)}."
        )
    if empty:
        raise ValueError(
            f"The class folder {root}/{split}/{empty[0]} holds no images ({len(empty)} such); add images or remove it."
        )
    return found


def _scan_split(folder: Path) -> dict[str, list[tuple[str, int, int]]]:
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    return {c: sorted(_images_below(folder / c, "")) for c in classes}


def _images_below(folder: Path, prefix: str) -> Iterator[tuple[str, int, int]]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _images_below(folder / entry.name, f"{prefix}{entry.name}/")
        elif _is_image(entry.name):
            yield prefix + entry.name, 0, file_size(entry.path)


def _is_image(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def _read_titles(root: Path) -> dict[str, str]:
    file = root / "classes.json"
    return _checked_titles(read_json(file), str(file)) if file.is_file() else {}


def _checked_titles(titles: object, where: str) -> dict[str, str]:
    if not isinstance(titles, dict):
        raise ValueError(f'{where} must be an object of folder name to class name, {{"n01": "tench"}}.')
    return dict(zip(titles, speakable(map(str, titles.values()), where), strict=True))


def _scan_tar(tar: Path) -> tuple[dict[str, dict[str, list]], dict[str, str], Path]:
    """Return the tree that a folder would give, with offsets; one enclosing top folder (as `tar c mydata` makes) is
    skipped."""
    members = list(tar_members(tar))
    tops = {name.split("/", 1)[0] for name, _, _ in members}
    skip = len(tops.pop()) + 1 if len(tops) == 1 and not tops & {"train", "val"} else 0
    if skip and all(name[skip:].count("/") == 1 for name, _, _ in members):
        skip = 0  # a tar of one split only: that top folder is the split
    tree: dict[str, dict[str, list]] = {}
    titles: dict[str, str] = {}
    for full_name, offset, size in members:
        name = full_name[skip:]
        if name == "classes.json":
            where = f"{tar}: classes.json"
            titles = _checked_titles(parse_json(ByteReader(tar).read(offset, size), where), where)
        split, _, rest = name.partition("/")
        class_name, _, file = rest.partition("/")
        if file and _is_image(file.rsplit("/", 1)[-1]):
            tree.setdefault(split, {}).setdefault(class_name, []).append((file, offset, size))
    return {s: {c: sorted(files) for c, files in classes.items()} for s, classes in tree.items()}, titles, tar


class PairsSource(Source):
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
