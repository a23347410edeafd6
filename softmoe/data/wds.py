"""The source wds:PATTERN: WebDataset shards, tars in which KEY.jpg, KEY.cls, KEY.txt, ... are parts of one example.

    wds:data/{split}-{000..010}.tar      {split} becomes train, val, ...; {000..010} and {a,b} expand as in a shell
    wds:data/held_out.tar                without {split}, it is taken as it is for any split
    wds:data/{split}/*.tar.gz            * as in a shell; .gz shards are unpacked once into the cache

Shards may lie at any address that fsspec knows (wds:s3://bucket/{split}-{000..010}.tar, gs://, https://); each is
copied once into the cache ($SOFTMOE_CACHE).

Parts: jpg, jpeg, png or webp; cls (a class number), json ("label": a number, or a list for a multi-label set;
"caption": a sentence or several) and txt (captions, one a line). Class names come from a classes.json beside
the shards ({"0": "tench"} or ["tench", ...]), else they are the numbers, up to the largest seen;
`?classes=1000` states how many there are.

Each tar is indexed once, so any example can be read at any time and a resume needs no skipping. `?order=shards` visits
the shards in random order and shuffles within `mix` of them at a time, for disks on which jumping about is slow.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from softmoe.data.decode import BrokenImage, decode, read_member
from softmoe.data.files import MAX_TEXT, ByteReader, Names, fetched, tar_members, unpacked
from softmoe.data.source import (
    MAX_CLASSES,
    Example,
    MinSide,
    Source,
    checked_titles,
    count_classes,
    fingerprint,
    positive_int,
    shortened,
)
from softmoe.storage.files import parse_json, printable, read_json

_IMAGES = ("jpg", "jpeg", "png", "webp")
_PARTS = (*_IMAGES, "cls", "json", "txt")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.\-]*://")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_MOST_SHARDS = 1_000_000


@dataclass
class _Row:
    """One example as it is indexed: where its image and caption parts are, what its labels are."""

    key: str
    shard: int
    image: tuple[int, int] | None = None
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: tuple[int, ...] | None = None
    listed: bool = False  # labels came as a list


class WdsSource(Source):
    """Examples of all shards, one after another."""

    def __init__(
        self, titles: list[str], shards: list[Path], rows: list[_Row], classes: tuple[str, ...], mix: int | None
    ):
        """Index the uncompressed tars `shards`; `titles` are their names for the user, `mix` is that of `order`."""
        self.classes = classes
        self.multi_label = any(row.listed for row in rows)
        self._titles = tuple(titles)
        self._shards = [ByteReader(path) for path in shards]
        self._keys = Names(row.key for row in rows)
        self._shard = np.array([row.shard for row in rows], dtype=np.int32)
        spans = [(row.image or (0, 0), row.parts.get("json", (0, 0)), row.parts.get("txt", (0, 0))) for row in rows]
        # image, json, txt; offset, size
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 3, 2)
        counts = [len(row.labels or ()) for row in rows]
        self._label_ends = np.cumsum(counts, dtype=np.int64)
        self.labels = np.array([label for row in rows for label in row.labels or ()], dtype=np.int64)
        if mix is not None:
            self.blocks, self.mix = tuple(np.bincount(self._shard, minlength=len(shards)).tolist()), mix
        self.fingerprint = fingerprint(
            "wds", json.dumps(classes), self._keys.blob, self._spans[:, :, 1].tobytes(), self.labels.tobytes(), counts
        )

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        shard = self._shards[self._shard[index]]
        name = f"{self._titles[self._shard[index]]}/{self._keys[index]}"
        offset, size = self._spans[index, 0]
        image = read_member(shard, int(offset), int(size), name) if size else b""
        try:
            captions = self._captions(index)
        except ValueError as error:
            raise BrokenImage(name, "its json part is not valid JSON") from error
        start = int(self._label_ends[index - 1]) if index else 0
        labels = tuple(self.labels[start : int(self._label_ends[index])].tolist())
        return Example(decode(image, name, min_side), labels, captions, name)

    def read_captions(self, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
        """Read captions without decoding the images; none where the json part is damaged."""
        found = []
        for index in indices:
            try:
                found.append(self._captions(int(index)))
            except ValueError:
                found.append(())
        return found

    def _captions(self, index: int) -> tuple[str, ...]:
        shard = self._shards[self._shard[index]]
        facts, text = (shard.read(int(o), int(n)) if n else b"" for o, n in self._spans[index, 1:])
        lines = tuple(line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip())
        return lines if lines or not facts else _caption_facts(parse_json(facts, "the json part", unique=False))


def open_wds(pattern: str, split: str, *, classes: str = "", order: str = "examples", mix: str = "8") -> WdsSource:
    """Open shards; a pattern without {split} is taken as it is, for whatever split it was named."""
    if order not in ("examples", "shards"):
        raise ValueError(f"The option order is 'examples' or 'shards', not {order!r}.")
    named = pattern.replace("{split}", split)
    if _ADDRESS.match(pattern):
        places = addresses(named)
        files, titles = [fetched(place) for place in places], [place.rsplit("/", 1)[-1] for place in places]
        beside = _beside(named)
    else:
        files = expand(named)
        titles, beside = [path.name for path in files], files[0].parent / "classes.json"
    shards = [unpacked(path) for path in files]
    rows = [row for number, shard in enumerate(shards) for row in _index(number, shard, titles[number])]
    if not rows:
        raise ValueError(f"The shards of {pattern!r} hold no images; an example needs a part {' or '.join(_IMAGES)}.")
    names = _class_names(beside, rows, positive_int("classes", classes) if classes else 0)
    return WdsSource(titles, shards, rows, names, positive_int("mix", mix) if order == "shards" else None)


def addresses(pattern: str) -> list[str]:
    """List the addresses that a pattern with braces and stars names, such as s3://bucket/train-{000..010}.tar."""
    if _variants(pattern) > _MOST_SHARDS:
        raise ValueError(f"The shards {shortened(pattern)!r} are more than {_MOST_SHARDS:,} names.")
    found: list[str] = []
    for name in _expand_braces(pattern):
        if "*" not in name:
            found.append(name)
            continue
        import fsspec

        system, place = fsspec.core.url_to_fs(name)
        matches = sorted(system.unstrip_protocol(match) for match in system.glob(place))
        if not matches:
            raise ValueError(f"No file {name} for the shards {pattern!r}; check the address.")
        found += matches
    return found


def expand(pattern: str) -> list[Path]:
    """List the files that a pattern with braces and stars names; each must exist."""
    if _variants(pattern) > _MOST_SHARDS:
        raise ValueError(f"The shards {shortened(pattern)!r} are more than {_MOST_SHARDS:,} names.")
    files: list[Path] = []
    for name in _expand_braces(os.path.expanduser(pattern)):
        matches = sorted(glob.glob(name)) if glob.has_magic(name) else [name] if Path(name).is_file() else []
        if not matches:
            raise ValueError(f"No file {name} for the shards {pattern!r}; check the folder and the numbers in braces.")
        files += map(Path, matches)
    return files


def _variants(pattern: str) -> int:
    """Return the largest number of names that the braces may stand for."""
    ranges = [_RANGE.fullmatch(inside) for inside in _BRACES.findall(pattern)]
    counts = [max(1, int(found[2]) - int(found[1]) + 1) for found in ranges if found]
    return math.prod([*counts, *(inside.count(",") + 1 for inside in _BRACES.findall(pattern))])


def _expand_braces(pattern: str) -> Iterator[str]:
    found = _BRACES.search(pattern)
    if found is None:
        yield pattern
        return
    inside = found.group(1)
    numbers = _RANGE.fullmatch(inside)
    if numbers:
        first, last = numbers.groups()
        choices = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    elif "," in inside:
        choices = inside.split(",")
    else:
        raise ValueError(f"The braces {found.group()} in {pattern!r} are neither a range like {{000..010}} nor a list.")
    for choice in choices:
        yield from _expand_braces(pattern[: found.start()] + choice + pattern[found.end() :])


def _index(number: int, shard: Path, title: str) -> list[_Row]:
    """List the examples of one shard that have an image, in its order."""
    rows: dict[str, _Row] = {}
    for name, offset, size in tar_members(shard):
        folder, slash, file = name.rpartition("/")
        key, _, suffix = file.partition(".")
        suffix = suffix.lower()
        if not key or suffix not in _PARTS:
            continue
        row = rows.setdefault(folder + slash + key, _Row(folder + slash + key, number))
        if suffix in _IMAGES:
            row.image = (offset, size)
        else:
            if size > MAX_TEXT:
                raise ValueError(
                    f"The part {suffix} of {title}/{printable(key)} has {size} bytes; {MAX_TEXT:,} are the limit."
                )
            row.parts[suffix] = (offset, size)
    reader = ByteReader(shard)
    kept = [row for row in rows.values() if row.image is not None]
    for row in kept:
        where = f"{title}/{printable(row.key)}"
        if "cls" in row.parts:
            row.labels = (_class_number(reader.read(*row.parts["cls"]).decode(errors="replace"), where),)
        elif "json" in row.parts:
            row.labels, row.listed = _label_facts(reader.read(*row.parts["json"]), where)
    return kept


def _class_number(text: object, where: str) -> int:
    try:
        number = int(str(text).strip())
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f"The label of {where} must be a class number from 0, not {shortened(str(text).strip())!r}.")
    return number


def _label_facts(data: bytes, where: str) -> tuple[tuple[int, ...] | None, bool]:
    """Return the labels of a json part, and whether they came as a list."""
    facts = parse_json(data, f"The json part of {where}", unique=False)
    value = (
        next((facts[k] for k in ("label", "labels", "cls") if k in facts), None) if isinstance(facts, dict) else None
    )
    if value is None:
        return None, False
    listed = isinstance(value, list)
    return tuple(_class_number(v, where) for v in (value if listed else [value])), listed


def _caption_facts(facts: object) -> tuple[str, ...]:
    """Return the sentences; null, numbers and the like are none."""
    keys = ("captions", "caption", "text")
    value = next((facts[k] for k in keys if k in facts), None) if isinstance(facts, dict) else None
    sentences = value if isinstance(value, list) else [value]
    return tuple(sentence for sentence in sentences if isinstance(sentence, str))


def _beside(pattern: str) -> Path | None:
    """Return a copy of the classes.json beside shards at addresses, if there is one."""
    try:
        return fetched(f"{pattern.rsplit('/', 1)[0]}/classes.json")
    except ValueError:
        return None


def _class_names(file: Path | None, rows: list[_Row], stated: int) -> tuple[str, ...]:
    labelled = [row for row in rows if row.labels is not None]
    if labelled and len(labelled) < len(rows):
        bare = next(row for row in rows if row.labels is None)
        named = printable(bare.key)
        raise ValueError(f"Some examples have labels but {named} has none; give all or none a cls or json part.")
    largest = max((max(row.labels or (), default=-1) for row in rows), default=-1)
    count = count_classes(largest, len(rows), stated)
    if not labelled or file is None or not file.is_file():
        return tuple(str(i) for i in range(count))
    said = read_json(file)
    titles = checked_titles({str(i): t for i, t in enumerate(said)} if isinstance(said, list) else said, file)
    for number in titles:
        if not _NUMBER.fullmatch(number) or int(number) >= MAX_CLASSES:
            raise ValueError(
                f"{file} must number its classes from 0 and below {MAX_CLASSES:,}, but one is {shortened(number)!r}."
            )
    known = max(map(int, titles), default=-1) + 1
    return tuple(titles.get(str(i), str(i)) for i in range(stated or max(count, known)))
