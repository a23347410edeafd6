"""Images in folders: with a class each (folder:PATH) or with captions beside them (pairs:PATH).

folder:PATH    PATH/train/<class>/*.jpg, PATH/val/<class>/*.jpg, optional PATH/classes.json {"<class>": "its name"};
               or a tar or tar.gz of that. The folder names of `train`, sorted, are the labels of every split
pairs:PATH     PATH/train/**/photo.jpg and photo.txt, one caption a line. An image without a .txt has no captions;
               bytes that are not UTF-8 are replaced, not refused

Without train/ and val/ (PATH/<class>/*.jpg) a tenth of each class is kept for validation, chosen by the names of the
files, so always the same; `?val=0.2` is another share, and the split `all` is everything. Where there is train/ and no
val/, `?val=0.1` takes it from train/. PATH/val as the path is all of that one split. Train/, Training/, Valid/ and
Validation/ are train/ and val/ in another spelling.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from softmoe.data.decode import BrokenImage, decode, read_image_file, read_member
from softmoe.data.files import MAX_TEXT, ByteReader, Names, file_size, files_below, folders_in, tar_members, unpacked
from softmoe.data.source import Example, MinSide, Source, checked_titles, fingerprint
from softmoe.machine import home_path, is_first_process
from softmoe.storage.files import MAX_JSON_BYTES, check_names, parse_json, read_json

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
_RAW = (".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".raf", ".rw2", ".pef")
_UNREAD = (".heic", ".heif", ".avif", ".jp2", ".j2k", ".jxl", ".psd", ".svg", *_RAW)
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_SPLITS = ("train", "val", "valid", "validation", "test")
_SPELLINGS = {s: s for s in _SPLITS} | {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
_HELD_OUT = 0.1  # of a folder without splits
_NAMED = 8  # classes that a message names
_logger = logging.getLogger("softmoe.data")
_told: set[str] = set()


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
        )

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        name = f"{self._split}/{self._names[index]}".lstrip("/")
        if self._tar is not None:
            data = read_member(self._tar, int(self._offsets[index]), int(self._sizes[index]), name)
        else:
            data = read_image_file(self._root / name, name)
        return Example(decode(data, name, min_side), (int(self.labels[index]),), name=name)


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
        here = set(tree) if len(tree) > 1 else set(tree) & {*_SPLITS, split}
    else:
        here = _split_folders(root, split)
        if not here and _is_split(root) and val is None:
            return open_folder(str(root.parent), root.name)
        tree, titles, stored = {} if here else _unsplit(root), _read_titles(root), root
    train, part = _spelled(here, "train"), _spelled(here, split)
    if root.is_dir():
        tree |= {s: _scan_split(root / s) for s in {train, part} & here}
    if tree and not here:
        ((part, whole),) = tree.items()
        share = _HELD_OUT if val is None else _share(val)
        tree = {part: _checked_split(root, {part: whole}, part)}
        found = _held_out(whole, split, share, root)
        _say_once(root, found, whole, split, share)
    elif val is not None and split in ("train", "val"):
        _check_val_option(here, root)
        found = _held_out(_checked_split(root, tree, train), split, _share(val), root)
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


def _split_folders(root: Path, split: str) -> set[str]:
    """Return the names of the folders that are splits.

    A class may be called Train: in another spelling than those of `_SPLITS`, one alone is a split if it holds folders.
    """
    alike = {name for name in folders_in(root) if name.lower() in _SPELLINGS}
    several = len({_SPELLINGS[name.lower()] for name in alike}) > 1
    sure = {name for name in alike if several or name in _SPLITS or folders_in(root / name)}
    return sure | ({split} if (root / split).is_dir() else set())


def _check_val_option(here: set[str], root: Path) -> None:
    if _spelled(here, "train") not in here or _spelled(here, "val") in here:
        raise ValueError(f"The option val takes images from train/, but {root} has val/ or no train/: leave it out.")


def _spelled(names: Collection[str], split: str) -> str:
    """Return the name that the split has among `names`: its own, or the only other spelling of it."""
    meant = _SPELLINGS.get(split.lower(), "")
    alike = [name for name in names if _SPELLINGS.get(name.lower()) == meant]
    return alike[0] if split not in names and len(alike) == 1 else split


def _is_split(root: Path) -> bool:
    """Tell if a folder is one split of the folder above; one in another spelling needs another split beside it."""
    if root.name in _SPLITS or root.name.lower() not in _SPELLINGS:
        return root.name in _SPLITS
    return len(_SPELLINGS.keys() & {name.lower() for name in folders_in(root.parent)}) > 1


def _unsplit(root: Path) -> dict[str, dict[str, list]]:
    """Return the classes of a folder that has no splits, as the one split without a name."""
    classes = _scan_split(root)
    if not classes:
        files = set(os.listdir(root))
        images = [os.path.splitext(name)[0] for name in files if is_image_name(name)]
        captions = any(f"{name}.txt" in files for name in images)
        holds = "images but no class folders" if images else "no folders of images"
        pairs = f"did you mean pairs:{root}, for the captions beside them? Else " if captions else ""
        raise ValueError(f"{root} holds {holds}; {pairs}put them at {root.name}/<class>/<image>.")
    return {"": classes}


def _held_out(whole: dict[str, list], split: str, share: float, root: Path) -> dict[str, list]:
    """Return the training or the validation part of each class. ValueError if nothing can be kept for validation."""
    if split == "all":
        return whole
    if split not in ("train", "val"):
        raise ValueError(f"{root} has no folder {split!r} and no splits: it has train, val and all.")
    parts = {name: _split_names(files, share) for name, files in whole.items()}
    if split == "val" and not any(held for held, _ in parts.values()):
        why = f"?val={share:g} keeps none" if not share else "it has one image" if "" in whole else "no class has two"
        raise ValueError(
            f"{root} has no images for validation: {why}; add some, or name others (in training --data.val PATH, in "
            "evaluation --split all)."
        )
    return {name: held if split == "val" else rest for name, (held, rest) in parts.items()}


def _split_names(files: list, share: float) -> tuple[list, list]:
    """Return (kept, rest), chosen by a hash of the name: the same on every machine, and stable when files are added."""
    count = min(len(files) - 1, max(1, round(len(files) * share))) if share else 0
    keys = [hashlib.blake2b(file[0].encode(errors="surrogateescape")).digest() for file in files]
    chosen = set(sorted(range(len(files)), key=keys.__getitem__)[:count])
    return [f for i, f in enumerate(files) if i in chosen], [f for i, f in enumerate(files) if i not in chosen]


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise ValueError(f"The option val is a share of the images from 0 to 1, like 0.1, not {text!r}.")
    return share


def _say_once(root: Path, found: dict[str, list], whole: dict[str, list], split: str, share: float) -> None:
    """Say which part is kept for validation, if any."""
    total, here = (sum(map(len, part.values())) for part in (whole, found))
    held = here if split == "val" else total - here
    if str(root) in _told or split == "all" or not held or not is_first_process():
        return
    _told.add(str(root))
    alone = [name for name, files in whole.items() if len(files) == 1]
    names = ", ".join(alone[:_NAMED]) + (f" and {len(alone) - _NAMED} more classes" if len(alone) > _NAMED else "")
    _logger.warning(
        "%s has no train/ and val/: %d of its %d images are kept for validation, always the same %.3g %%%s?val=0.2 "
        "keeps another share%s)%s",
        *(root, held, total, 100 * share, f" (pairs:{root}" if "" in whole else f" of each class ({root}"),
        ", --split all takes all, in training --data.val-split all" if split == "val" else "",
        f"; none of {names}, which {'has one image' if len(alone) == 1 else 'have one image each'}" if alone else "",
    )


def _checked_split(root: Path, tree: dict[str, dict[str, list]], split: str) -> dict[str, list]:
    if split not in tree:
        there = folders_in(root) if root.is_dir() else sorted(tree)
        train = _spelled(there, "train")
        other = next((name for name in there if _SPELLINGS.get(name.lower(), "train") != "train"), None)
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
    _say_left_out(folder, itertools.chain(*files.values()))
    images = {c: [name for name in names if is_image_name(name.rpartition("/")[2])] for c, names in files.items()}
    return {c: sorted((name, 0, file_size(folder / c / name)) for name in names) for c, names in images.items()}


def _say_left_out(where: Path, names: Iterable[str]) -> None:
    """Say which of the files are images that are not read, if any."""
    unread = [name for name in names if name.lower().endswith(_UNREAD) and not name.rpartition("/")[2].startswith(".")]
    if not unread or f"left out of {where}" in _told or not is_first_process():
        return
    _told.add(f"left out of {where}")
    counts = Counter(os.path.splitext(name)[1].lower() for name in unread)
    kinds = ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items()))
    _logger.warning("Left out of %s, since these are not read: %s; convert them to JPEG", where, kinds)


def is_image_name(name: str) -> bool:
    """Tell if a file counts as an image by its ending; hidden files, such as the ._ ones of macOS, do not."""
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


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
    _say_left_out(packed, (name for name, _, _ in members))
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


class PairsSource(Source):
    """Images in the order of their names, each with the captions in the .txt file beside it."""

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
            text = read_image_file(path, path.name, MAX_TEXT)
        except BrokenImage:
            return ()
        return tuple(line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip())

    def _path(self, index: int) -> Path:
        return self._root / self._names[index]


def open_pairs(path: str, split: str, *, val: str | None = None) -> PairsSource:
    above = home_path(path)
    here = _split_folders(above, split) if above.is_dir() else {split}
    root, whole = above / _spelled(here, split), not here
    if not root.is_dir() and not whole:
        raise ValueError(f"there is no folder {root}; pairs:PATH needs PATH/{split}/photo.jpg and photo.txt beside it.")
    root = above if whole else root
    files = list(root.rglob("*"))
    _say_left_out(root, (p.name for p in files))
    names = sorted(p.relative_to(root).as_posix() for p in files if is_image_name(p.name))
    if not names:
        raise ValueError(f"{root} holds no images with one of the endings {' '.join(IMAGE_SUFFIXES)}.")
    if whole and not _is_split(above):
        share, every = _HELD_OUT if val is None else _share(val), {"": [(name,) for name in names]}
        found = _held_out(every, split, share, root)
        _say_once(root, found, every, split, share)
        names = [name for (name,) in found[""]]
    return PairsSource(root, names)
