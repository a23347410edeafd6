"""The contract of a source of images, and how a URI-like string becomes one.

    shapes?size=48&classes=upstream      our own generator, nothing to download
    characters?classes=1000              thousands of classes drawn from fonts, nothing to download (extra: plots)
    folder:PATH, or just PATH            PATH/train/<class>/*, PATH/val/<class>/*, or a tar or tar.gz of that
    PATH?val=0.1                         PATH/<class>/*, of which a tenth is kept for validation
    wds:PATH/{split}-{000..010}.tar      WebDataset shards
    pairs:PATH                           PATH/train/photo.jpg with its captions in photo.txt
    hf:PATH_OR_NAME                      a Hugging Face data set            (extra: hf)
    idx:PATH                             MNIST-style idx files, gz or not
    digits                               scikit-learn's 8x8 digits          (extra: digits)

Options follow a question mark: `wds:PATTERN?classes=1000&order=shards`. A source is map-style: any example by its
index, so the order of examples and an exact resume are arithmetic on indices and not the source's business.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import os
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from softmoe.data.files import folders_in
from softmoe.paths import home_path
from softmoe.storage.files import check_names

# The shortest side the reader needs: a number, or a function of the stored (height, width) that is called
# once, before decoding. A transform uses the function to choose its crop first and then have only that much
# of the image decoded.
MinSide = int | Callable[[int, int], int] | None
MAX_DRAWN = 512  # pixels a side
FEW_CLASSES, MAX_CLASSES = 100_000, 1_000_000  # see count_classes


@dataclass(frozen=True)
class Example:
    """One image with what is known about it. `image` is (h, w, 3) uint8 RGB."""

    image: np.ndarray
    labels: tuple[int, ...]
    captions: tuple[str, ...] = ()
    name: str = ""


@runtime_checkable
class Source(Protocol):
    """Examples by index. Picklable, cheap to send to a worker; file handles are opened again in each process.

    Some attributes are optional. `read_batch(indices, captions=True) -> list[Example]` where reading many at once is
    faster, and faster still without captions. `read_captions(indices) -> list[tuple[str, ...]]` where captions can be
    had without the images. `labels` (an array of all labels) where they are known without reading. `blocks` (sizes of
    consecutive runs of indices, one per shard) and `mix` (shards read at a time) where examples should be read shard by
    shard. `generated` is True where examples are drawn without end.
    """

    classes: tuple[str, ...]
    multi_label: bool
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example:
        return self.read(index)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        """Return the example, its image perhaps decoded smaller, but never with a shorter side below `min_side`."""
        ...


class DrawnSource(Source):
    """Pictures that are drawn as they are read. Labels go round: example i has label i mod classes."""

    multi_label = False
    generated = True
    kind: str
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        return self.read_batch([index])[0]

    def read(self, index: int, min_side: MinSide = None) -> Example:
        """Draw examples; `min_side` is not needed, since pictures have the size asked for at opening."""
        return self[index]

    def read_batch(self, indices: Sequence[int] | np.ndarray, captions: bool = True) -> list[Example]:
        raise NotImplementedError

    def rows(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the indices as an array. IndexError for one that is not there."""
        rows = np.asarray(indices, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.length):
            raise IndexError(f"{self.kind} has the examples 0 to {self.length - 1}, not {rows.min()} to {rows.max()}")
        return rows


def drawing_options(kind: str, size: str, seed: str, length: str, usual: int) -> tuple[int, int, int]:
    """Return pixels a side, seed and number of the pictures of a `DrawnSource`, read from its options."""
    if not seed.isdigit():
        raise ValueError(f"The option seed must be a whole number from 0, not {seed!r}.")
    count = positive_int("length", length) if length else usual
    pixels = positive_int("size", size)
    if not 8 <= pixels <= MAX_DRAWN:
        raise ValueError(f"{kind} draws pictures of 8 to {MAX_DRAWN} pixels a side, not {pixels}.")
    return pixels, int(seed), count


# scheme -> (module, function); the modules are imported when asked for, so that extras stay at the edge
_SCHEMES = {
    "shapes": ("softmoe.data.shapes", "open_shapes"),
    "characters": ("softmoe.data.characters", "open_characters"),
    "folder": ("softmoe.data.folder", "open_folder"),
    "wds": ("softmoe.data.wds", "open_wds"),
    "pairs": ("softmoe.data.pairs", "open_pairs"),
    "hf": ("softmoe.data.foreign", "open_hf"),
    "idx": ("softmoe.data.foreign", "open_idx"),
    "digits": ("softmoe.data.foreign", "open_digits"),
}
_WITHOUT_PATH = ("shapes", "characters", "digits")


def open_source(uri: str, split: str) -> Source:
    """Return the source that `uri` names, its sub-set `split` ("train", "val", or any name the source has)."""
    scheme, path, options = parse_uri(uri)
    module, function = _SCHEMES[scheme]
    opener = getattr(import_module(module), function)
    allowed = [name for name, p in inspect.signature(opener).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for key in options:
        if key not in allowed:
            raise ValueError(
                f"The source {uri!r} has the option {key!r}, but {scheme} takes "
                f"{' and '.join(allowed) or 'no options'}.{_nearest(key, allowed)}"
            )
    return opener(split, **options) if scheme in _WITHOUT_PATH else opener(path, split, **options)


def open_splits(uri: str, first: str, second: str) -> tuple[Source, Source]:
    """Return two sub-sets of a source. ValueError if they are the same images, as in one that does not know splits."""
    sources = open_source(uri, first), open_source(uri, second)
    if first != second and sources[0].fingerprint == sources[1].fingerprint:
        raise ValueError(
            f"{uri} gives the same images for {first!r} and {second!r}: name the folder above it, write {{split}} "
            "where the names of shards differ, or in training set data.val"
        )
    return sources


def parse_uri(uri: str) -> tuple[str, str, dict[str, str]]:
    """Return scheme, path and options of a source string, or raise ValueError. A path that exists means folder:PATH."""
    address, _, query = uri.partition("?")
    scheme, _, path = address.partition(":")
    if scheme not in _SCHEMES and home_path(address).exists():
        scheme, path = "folder", address
    elif scheme not in _SCHEMES and (not path or len(scheme) == 1) and ("/" in address or "\\" in address):
        raise ValueError(
            f"There is no folder {address}; a data source is a folder of images, or shapes, wds:PATTERN..."
            f"{_nearest(Path(address).name, _siblings(address))}"
        )
    if scheme not in _SCHEMES:
        known = ", ".join(s if s in _WITHOUT_PATH else s + ":" for s in _SCHEMES)
        folders = [] if path else _siblings(address)
        why = "it" if path else "there is no folder of that name, and a source of another kind"
        hint = _nearest(scheme, [*folders, *_SCHEMES])
        raise ValueError(f"Unknown data source {uri!r}: {why} starts with one of {known}.{hint}")
    if scheme in _WITHOUT_PATH and path:
        raise ValueError(f"The source {scheme!r} has no path, but {uri!r} gives {path!r}; write {scheme}?key=value.")
    if scheme not in _WITHOUT_PATH and not path:
        raise ValueError(f"The source {uri!r} lacks its path; write {scheme}:PATH.")
    options = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"The option {part!r} in {uri!r} has no value; write {key}=VALUE.")
        options[key] = value
    return scheme, path, options


def fingerprint(*parts: str | bytes | Iterable[int]) -> str:
    """Return a short stable hash of what the data is: the same on every machine and at every path."""
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        raw = part.encode(errors="surrogateescape") if isinstance(part, str) else part  # names need not be text
        data = raw if isinstance(raw, bytes) else np.asarray(list(raw), dtype="<i8").tobytes()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def count_classes(largest: int, examples: int, stated: int = 0) -> int:
    """Return the number of classes if labels go up to `largest`; ValueError for a number that is damage.

    There must be fewer classes than `FEW_CLASSES`, or than ten for each example, or as many as were stated, and never
    more than `MAX_CLASSES`: a list of their names would fill the memory.
    """
    limit = stated or min(max(FEW_CLASSES, 10 * examples), MAX_CLASSES)
    if stated > MAX_CLASSES:
        raise ValueError(f"The option classes is {stated}, but there may be at most {MAX_CLASSES:,} classes.")
    if largest >= limit and stated:
        raise ValueError(f"The data has the label {shortened(largest)}, outside the {stated} classes that were stated.")
    if largest >= limit:
        raise ValueError(
            f"The data has the label {shortened(largest)}, and {examples:,} examples can hardly have so many classes: "
            f"{limit:,} is the limit."
        )
    return stated or largest + 1


def checked_titles(titles: object, where: Path | str) -> dict[str, str]:
    """Return what a classes.json says: names of classes by folder or number. ValueError for anything else."""
    if not isinstance(titles, dict):
        raise ValueError(f'{where} must be an object of folder or number to class name, {{"n01": "tench"}}.')
    for key, title in titles.items():
        if not isinstance(title, str | int) or isinstance(title, bool):
            raise ValueError(f"{where} must give {shortened(key)!r} the name of a class, not {reprlib.repr(title)}.")
    return dict(zip(titles, check_names(map(str, titles.values()), where), strict=True))


def shortened(value: object) -> str:
    """Return at most forty characters of a value from a stranger's file, for a message."""
    text = str(value) if not isinstance(value, int) or value.bit_length() < 200 else "of more than 60 digits"
    return text if len(text) <= 40 else text[:40] + "..."


def positive_int(name: str, value: str | int) -> int:
    """Return an option's value as a positive whole number."""
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"The option {name} must be a positive whole number, not {value!r}.")
    return number


def _siblings(address: str) -> list[str]:
    """Return the names of the folders beside where `address` would be."""
    above = home_path(address).parent
    return folders_in(above) if above.is_dir() and os.access(above, os.R_OK) else []


def _nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
