"""Divide a folder of images into training and validation: by its folders, or by a hash of the files' names.

Without train/ and val/ a tenth of each class is kept for validation, chosen by the names of the files, so always the
same; `?val=0.2` is another share, and the split `all` is everything. Train/, Training/, Valid/ and Validation/ are
train/ and val/ in another spelling.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from pathlib import Path

from softmoe.data.files import folders_in
from softmoe.machine import is_first_process

SPLITS = ("train", "val", "valid", "validation", "test")
SPELLINGS = {s: s for s in SPLITS} | {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
HELD_OUT = 0.1  # of a folder without splits
_NAMED = 8  # classes that a message names
_logger = logging.getLogger("softmoe.data")
_reported: set[Path] = set()


def split_folders(root: Path, split: str) -> set[str]:
    """Return the names of the folders that are splits.

    A class may be called Train: in another spelling than those of `SPLITS`, one alone is a split if it holds folders.
    """
    alike = {name for name in folders_in(root) if name.lower() in SPELLINGS}
    several = len({SPELLINGS[name.lower()] for name in alike}) > 1
    sure = {name for name in alike if several or name in SPLITS or folders_in(root / name)}
    return sure | ({split} if (root / split).is_dir() else set())


def spelled(names: Collection[str], split: str) -> str:
    """Return the name that the split has among `names`: its own, or the only other spelling of it."""
    meant = SPELLINGS.get(split.lower(), "")
    alike = [name for name in names if SPELLINGS.get(name.lower()) == meant]
    return alike[0] if split not in names and len(alike) == 1 else split


def check_val_option(here: set[str], root: Path) -> None:
    """Raise ValueError unless there is train/ for the option to take images from, and no val/."""
    if spelled(here, "train") not in here or spelled(here, "val") in here:
        raise ValueError(f"The option val takes images from train/, but {root} has val/ or no train/: leave it out.")


def is_split(root: Path) -> bool:
    """Tell if a folder is one split of the folder above; one in another spelling needs another split beside it."""
    if root.name in SPLITS or root.name.lower() not in SPELLINGS:
        return root.name in SPLITS
    return len(SPELLINGS.keys() & {name.lower() for name in folders_in(root.parent)}) > 1


def held_out(whole: dict[str, list], split: str, share: float, root: Path) -> dict[str, list]:
    """Return the training or the validation part of each class. ValueError if nothing can be kept for validation."""
    if split == "all":
        return whole
    if split not in ("train", "val"):
        raise ValueError(f"{root} has no folder {split!r} and no splits: it has train, val and all.")
    parts = {name: split_names(files, share) for name, files in whole.items()}
    if split == "val" and not any(held for held, _ in parts.values()):
        why = f"?val={share:g} keeps none" if not share else "it has one image" if "" in whole else "no class has two"
        raise ValueError(
            f"{root} has no images for validation: {why}; add some, or name others (in training --data.val PATH, in "
            "evaluation --split all)."
        )
    return {name: held if split == "val" else rest for name, (held, rest) in parts.items()}


def split_names(files: list, share: float) -> tuple[list, list]:
    """Return (kept, rest), chosen by a hash of the name: the same on every machine, and stable when files are added."""
    count = min(len(files) - 1, max(1, round(len(files) * share))) if share else 0
    keys = [hashlib.blake2b(file[0].encode(errors="surrogateescape")).digest() for file in files]
    chosen = set(sorted(range(len(files)), key=keys.__getitem__)[:count])
    return [f for i, f in enumerate(files) if i in chosen], [f for i, f in enumerate(files) if i not in chosen]


def parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise ValueError(f"The option val is a share of the images from 0 to 1, like 0.1, not {text!r}.")
    return share


def report_held_out(root: Path, found: dict[str, list], whole: dict[str, list], split: str, share: float) -> None:
    """Say which part is kept for validation, if any."""
    total, here = (sum(map(len, part.values())) for part in (whole, found))
    held = here if split == "val" else total - here
    if root in _reported or split == "all" or not held or not is_first_process():
        return
    _reported.add(root)
    alone = [name for name, files in whole.items() if len(files) == 1]
    names = ", ".join(alone[:_NAMED]) + (f" and {len(alone) - _NAMED} more classes" if len(alone) > _NAMED else "")
    _logger.warning(
        "%s has no train/ and val/: %d of its %d images are kept for validation, always the same %.3g %%%s?val=0.2 "
        "keeps another share%s)%s",
        *(root, held, total, 100 * share, f" (pairs:{root}" if "" in whole else f" of each class ({root}"),
        ", --split all takes all, in training --data.val-split all" if split == "val" else "",
        f"; none of {names}, which {'has one image' if len(alone) == 1 else 'have one image each'}" if alone else "",
    )
