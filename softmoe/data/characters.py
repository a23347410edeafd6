"""characters - thousands of classes drawn from fonts: much to know, endless pictures, nothing to download.

    characters                                     2,781 letters, numbers and symbols, from the fonts inside matplotlib
    characters?classes=1000&size=48&scene=many     the first thousand; the label is that of the largest of four
    characters?classes=downstream                  100 classes that are never upstream ones, for 10-shot
    characters?faces=unseen                        the upstream classes in fonts that are not drawn from in training
    characters?fonts=cjk&classes=10000             Chinese characters, if the system has fonts for them
    characters?fonts=/a/folder                     the fonts of a folder

Example `index` of a split is a pure function of (seed, split, index) and the fonts; the scene does not change with the
size. A model that is small for so many classes is bound by what it can know, as the paper's models on JFT are.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from softmoe.data import characters_glyphs as glyphs
from softmoe.data.characters_scenes import INKS, PAPERS, SCENES, Scenes, Written, compose, draw
from softmoe.data.order import uniforms
from softmoe.data.shapes_scenes import with_article
from softmoe.data.source import DrawnSource, Example, drawing_options, fingerprint

FACES = ("seen", "unseen")
CLASS_SETS = ("upstream", "downstream")
_LENGTHS = {"train": 2**22}
_EVALUATION_LENGTH = 10_000
_CHUNK = 64 * 32 * 32  # pixels drawn together: fewer cost more calls, more leave the caches
_VERSION = "1"  # changes when the same (seed, index) would give another picture


class CharactersSource(DrawnSource):
    """Characters on paper."""

    kind = "characters"

    def __init__(self, split: str, size: int, classes: str, fonts: str, faces: str, scene: str, seed: int, length: int):
        self.split, self.size, self.faces, self.scene, self.length = split, size, faces, scene, length
        self._fonts, self._count = fonts, None if classes in CLASS_SETS else int(classes)
        self._downstream = classes == "downstream"
        if self._downstream:
            self._count = 1  # as few of the others as can be
        table = self._glyphs
        part = slice(0, glyphs.DOWNSTREAM) if self._downstream else slice(glyphs.DOWNSTREAM, None)
        self._labels = np.arange(len(table.characters))[part]
        self.classes = tuple(map(class_name, table.characters[part]))
        parts = (split, classes, table.digest, faces, scene)
        self.fingerprint = fingerprint("characters", _VERSION, *parts, [size, seed, length])
        self._key = int(fingerprint("stream", split, faces, [seed])[:16], 16)

    @cached_property
    def _glyphs(self) -> glyphs.Glyphs:
        return glyphs.load(self._fonts, self._count)

    def __getstate__(self) -> dict:
        """Bitmaps are read again from the cache folder in each process."""
        return {name: value for name, value in vars(self).items() if name != "_glyphs"}

    def read_batch(self, indices: Sequence[int] | np.ndarray, captions: bool = True) -> list[Example]:
        rows, examples = self.rows(indices), []
        chunk = max(1, _CHUNK // self.size**2)
        for start in range(0, len(rows), chunk):
            part = rows[start : start + chunk]
            scenes = self.scenes(part)
            pictures = draw(self._glyphs, scenes, self.size)
            said = self._captions(scenes, part) if captions else [()] * len(part)
            labels = (part % len(self.classes)).tolist()
            examples += [
                Example(picture, (label,), sentences, f"characters/{self.split}/{index}")
                for picture, label, sentences, index in zip(pictures, labels, said, part.tolist(), strict=True)
            ]
        return examples

    def read_captions(self, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
        """Without drawing the scenes."""
        rows = self.rows(indices)
        return self._captions(self.scenes(rows), rows)

    def scenes(self, rows: np.ndarray) -> Scenes:
        labels = self._labels[rows % len(self._labels)]
        return compose(self._glyphs, labels, self._labels, FACES.index(self.faces), self.scene, self._key, rows)

    def _captions(self, scenes: Scenes, rows: np.ndarray) -> list[tuple[str, ...]]:
        wording = (uniforms(self._key ^ 0x5EED, rows, 1)[:, 0] * 4).astype(int)
        return [self._sentences(scenes, i, order) for i, order in enumerate(wording.tolist())]

    def _sentences(self, scenes: Scenes, i: int, order: int) -> tuple[str, ...]:
        main = scenes.written[-1]
        name, ink = self._name(main, i), tuple(INKS)[main.ink[i]]
        paper = f"{tuple(PAPERS)[scenes.paper[i]]} paper"
        if len(scenes.written) == 1:
            told = (
                f"{with_article(ink)} {name} on {paper}",
                f"the character {name}, written in {ink}",
                f"{paper} with {with_article(ink)} {name}",
                f"a picture of {with_article(name)} in {ink} on {paper}",
            )
        else:
            small = scenes.written[0]
            beside = f"a small {tuple(INKS)[small.ink[i]]} {self._name(small, i)}"
            where = _relation(main.x[i] - small.x[i], main.y[i] - small.y[i])
            told = (
                f"a large {ink} {name} {where} {beside}",
                f"several characters on {paper}, the largest is {with_article(ink)} {name}",
                f"a large {name} in {ink} on {paper}, {where} {beside}",
                f"{with_article(ink)} {name} {where} {beside}, on {paper}",
            )
        return told[order], told[(order + 1) % len(told)]

    def _name(self, written: Written, i: int) -> str:
        return class_name(self._glyphs.characters[written.label[i]])


def class_name(character: str) -> str:
    """Unicode's name in small letters; Chinese characters have none and stand for themselves."""
    name = unicodedata.name(character, f"u+{ord(character):04x}").lower()
    return f"ideograph {character}" if name.startswith("cjk unified ideograph") else name


def _relation(dx: float, dy: float) -> str:
    if abs(dx) > abs(dy):
        return "right of" if dx > 0 else "left of"
    return "above" if dy > 0 else "below"


def open_characters(
    split: str,
    *,
    size: str = "32",
    classes: str = "upstream",
    scene: str = "one",
    faces: str = "seen",
    fonts: str = "matplotlib",
    seed: str = "0",
    length: str = "",
) -> CharactersSource:
    for name, value, known in (("scene", scene, SCENES), ("faces", faces, FACES)):
        if value not in known:
            raise ValueError(f"The option {name} must be {' or '.join(known)}, not {value!r}.")
    if classes not in CLASS_SETS and (not classes.isdigit() or int(classes) < 2):
        raise ValueError(f"The option classes must be {', '.join(CLASS_SETS)} or a number from 2, not {classes!r}.")
    pixels, key, count = drawing_options("characters", size, seed, length, _LENGTHS.get(split, _EVALUATION_LENGTH))
    return CharactersSource(split, pixels, classes, fonts, faces, scene, key, count)
