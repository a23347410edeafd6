"""Images with a class each, in folders: folder:PATH.

PATH/train/<class>/*.jpg, PATH/val/<class>/*.jpg, optional PATH/classes.json {"<class>": "its name"}; or a tar or tar.gz
of that. The folder names of `train`, sorted, are the labels of every split.

Without train/ and val/ (PATH/<class>/*.jpg) a tenth of each class is kept for validation (splits.py). Where there is
train/ and no val/, `?val=0.1` takes it from train/. PATH/val as the path is all of that one split.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np

from softmoe.data.decode import decode, is_uncompressed, read_image_file, read_member, some_contents
from softmoe.data.files import (
    IMAGE_SUFFIXES,
    ByteReader,
    Names,
    file_size,
    files_below,
    folders_in,
    is_image_name,
    report_left_out,
    tar_members,
    unpacked,
)
from softmoe.data.source import Example, MinSide, Source, checked_titles, fingerprint
from softmoe.data.splits import (
    HELD_OUT,
    SPELLINGS,
    SPLITS,
    check_val_option,
    held_out,
    is_split,
    parse_share,
    report_held_out,
    spelled,
    split_folders,
)
from softmoe.paths import home_path
from softmoe.storage.files import MAX_JSON_BYTES, check_names, parse_json, read_json

_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")


class FolderSource(Source):
    """Images whose class is the name of their folder."""

    multi_label = False

    def __init__(self, root: Path, split: str, classes: list[str], titles: dict[str, str], found: dict[str, list]):
        """Make the source of the files in `found`: class -> [(name within the split, offset, size)].

        `root` is a folder, or a tar read by offset. An empty `split` is a folder that has classes and no splits.
        """
        ids = {name: i for i, name in enumerate(classes)}
        rows = [(ids[c], f"{c}/{name}", offset, size) for c in classes for name, offset, size in found.get(c, [])]
        self.classes = tuple(titles.get(c, c) for c in classes)
        self._root, self._split = root, split
        self._tar = ByteReader(root) if root.is_file() else None
        self.labels = np.array([r[0] for r in rows], dtype=np.int32)
        self._names = Names(r[1] for r in rows)
        self._offsets = np.array([r[2] for r in rows], dtype=np.int64)
        self._sizes = np.array([r[3] for r in rows], dtype=np.int64)
        self.fingerprint = fingerprint(
            "folder",
            json.dumps([classes, self.classes]),
            self._names.blob,
            self._sizes.tobytes(),
            self.labels.tobytes(),
            *some_contents(
                lambda i: self._file(i)[1], ((i, r[3]) for i, r in enumerate(rows) if is_uncompressed(r[1]))
            ),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        name, data = self._file(index)
        return Example(decode(data, name, min_side), (int(self.labels[index]),), name=name)

    def _file(self, index: int) -> tuple[str, bytes]:
        name = f"{self._split}/{self._names[index]}".lstrip("/")
        if self._tar is None:
            return name, read_image_file(self._root / name, name)
        return name, read_member(self._tar, int(self._offsets[index]), int(self._sizes[index]), name)


def open_folder(path: str, split: str, *, val: str | None = None) -> FolderSource:
    root = home_path(path)
    if not root.exists():
        raise ValueError(f"The data folder {root} does not exist; give one with <class>/<image> in it: --data PATH.")
    if root.is_file():
        if not root.name.endswith(_TAR_SUFFIXES):
            raise ValueError(
                f"{root} is a file; images come as a folder with <class>/<image> in it, or a .tar or .tar.gz."
            )
        tree, titles, stored = _scan_tar(unpacked(root), root)
        here = set(tree) if len(tree) > 1 else set(tree) & {*SPLITS, split}
    else:
        here = split_folders(root, split)
        if not here and is_split(root) and val is None:
            return open_folder(str(root.parent), root.name)
        tree, titles, stored = {} if here else _unsplit(root), _read_titles(root), root
    train, part = spelled(here, "train"), spelled(here, split)
    if root.is_dir():
        tree |= {s: _scan_split(root / s) for s in {train, part} & here}
    if tree and not here:
        ((part, whole),) = tree.items()
        share = HELD_OUT if val is None else parse_share(val)
        tree = {part: _checked_split(root, {part: whole}, part)}
        found = held_out(whole, split, share, root)
        report_held_out(root, found, whole, split, share)
    elif val is not None and split in ("train", "val"):
        check_val_option(here, root)
        found = held_out(_checked_split(root, tree, train), split, parse_share(val), root)
        part = train
    else:
        found = _checked_split(root, tree, part)
    classes = list(check_names(sorted(tree.get(train, tree.get(part, found))), root))
    strangers = sorted(set(found) - set(classes))
    if strangers:
        raise ValueError(
            f"{root}/{part} has the class {strangers[0]!r} ({len(strangers)} such), not in {root}/{train}; "
            "every class to be scored must be one that is trained."
        )
    return FolderSource(stored, part, classes, titles, found)


def _unsplit(root: Path) -> dict[str, dict[str, list]]:
    """Return the classes of a folder that has no splits, as the one split without a name."""
    classes = _scan_split(root)
    if not classes:
        files = set(os.listdir(root))
        images = [os.path.splitext(name)[0] for name in files if is_image_name(name)]
        captions = any(f"{name}.txt" in files for name in images)
        holds = "images but no class folders" if images else "no folders of images"
        pairs = f"did you mean pairs:{root}, for the captions beside them? Else " if captions else ""
        raise ValueError(f"{root} holds {holds}; {pairs}put them at {root}/<class>/<image>.")
    return {"": classes}


def _checked_split(root: Path, tree: dict[str, dict[str, list]], split: str) -> dict[str, list]:
    if split not in tree:
        there = folders_in(root) if root.is_dir() else sorted(tree)
        train = spelled(there, "train")
        other = next((name for name in there if SPELLINGS.get(name.lower(), "train") != "train"), None)
        hint = f"folder:PATH needs PATH/{split}/<class>/<image>."
        if split == "val" and train in there:
            named = f", or name the split: --data.val-split {other} in training, --split {other} in evaluation"
            hint = f"take it from {train}/ with {root}?val=0.1{named if other else ''}."
        raise ValueError(f"{root} has no folder {split!r} (it has {', '.join(there[:8]) or 'no folders'}); {hint}")
    found = tree[split]
    empty = sorted(c for c, files in found.items() if not files)
    if not found or len(empty) == len(found):
        raise ValueError(
            f"{root / split} holds no images in class folders; put them at {(Path(split) / '<class>/<image>')}, "
            f"with one of the endings {' '.join(IMAGE_SUFFIXES)}."
        )
    if empty:
        raise ValueError(
            f"The class folder {root / split / empty[0]} holds no images ({len(empty)} such); add images or remove it."
        )
    return found


def _scan_split(folder: Path) -> dict[str, list[tuple[str, int, int]]]:
    files = {c: list(files_below(folder / c)) for c in folders_in(folder)}
    report_left_out(folder, itertools.chain(*files.values()))
    images = {c: [name for name in names if is_image_name(name.rpartition("/")[2])] for c, names in files.items()}
    return {c: sorted((name, 0, file_size(folder / c / name)) for name in names) for c, names in images.items()}


def _read_titles(root: Path) -> dict[str, str]:
    file = root / "classes.json"
    return checked_titles(read_json(file), str(file)) if file.is_file() else {}


def _scan_tar(tar: Path, packed: Path) -> tuple[dict[str, dict[str, list]], dict[str, str], Path]:
    """Return the tree that a folder would give, with offsets; an enclosing folder (`tar c mydata`) is skipped."""
    members = list({member[0]: member for member in tar_members(tar)}.values())  # of one name the last, as tar does
    tops = {name.split("/", 1)[0] for name, _, _ in members}
    skip = len(tops.pop()) + 1 if len(tops) == 1 and not tops & {"train", "val"} else 0
    if skip and all(name[skip:].count("/") == 1 for name, _, _ in members):
        skip = 0  # a tar of one split only: that top folder is the split
    report_left_out(packed, (name for name, _, _ in members))
    tree: dict[str, dict[str, list]] = {}
    titles: dict[str, str] = {}
    for full_name, offset, size in members:
        name = full_name[skip:]
        if name == "classes.json":
            where = f"{tar}: classes.json"
            if size > MAX_JSON_BYTES:
                raise ValueError(f"{where} has {size:,} bytes, {MAX_JSON_BYTES:,} are the limit.")
            titles = checked_titles(parse_json(ByteReader(tar).read(offset, size), where), where)
        split, _, rest = name.partition("/")
        class_name, _, file = rest.partition("/")
        if file and is_image_name(file.rsplit("/", 1)[-1]):
            tree.setdefault(split, {}).setdefault(class_name, []).append((file, offset, size))
    return {s: {c: sorted(files) for c, files in classes.items()} for s, classes in tree.items()}, titles, tar
