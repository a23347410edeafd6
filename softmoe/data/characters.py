"""The source `characters`: thousands of classes drawn from fonts, endless pictures, nothing to download.

    characters                                     2,781 letters, numbers and symbols, from the fonts inside matplotlib
    characters?classes=1000&scene=moving           the first thousand; one of any size anywhere in the picture
    characters?classes=1000&size=48&scene=many     the same; the label is that of the largest of four
    characters?classes=downstream                  100 classes that are never upstream ones, for 10-shot
    characters?faces=unseen                        the upstream classes in fonts that are not drawn from in training
    characters?fonts=cjk&classes=10000             Chinese characters, if the system has fonts for them
    characters?fonts=/a/folder                     the fonts of a folder

Example `index` of a split is a pure function of (seed, split, index) and the fonts; the scene does not change with the
size. Thousands of classes in endless pictures are what the paper's models have in JFT, at a size for one core.

Coordinates of scenes: the picture is [-1, 1] x [-1, 1] with y up; radii, half the longer side of a character, are in
the same units, so a scene does not depend on the number of pixels.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from softmoe.data import characters_glyphs as glyphs
from softmoe.data.characters_glyphs import BYTES, CELL, FILLED, LEVELS, STARTS, Glyphs
from softmoe.data.order import Dice, uniforms
from softmoe.data.shapes_draw import as_column, pixel_centers
from softmoe.data.shapes_scenes import with_article
from softmoe.data.shapes_tables import noise_windows
from softmoe.data.source import DrawnSource, Example, drawing_options, fingerprint

FACES = ("seen", "unseen")
CLASS_SETS = ("upstream", "downstream")
_LENGTHS = {"train": 2**22}
_EVALUATION_LENGTH = 10_000
_CHUNK = 64 * 32 * 32  # pixels drawn together: fewer cost more calls, more leave the caches
_VERSION = "1"  # changes when the same (seed, index) would give another picture
SCENES = ("one", "moving", "many")
RADII = {"one": (0.72, 0.92), "moving": (0.36, 0.84), "many": (0.34, 0.50)}  # of the labelled character
COMPANIONS = 3  # of scenes of many: smaller characters around the labelled one
INKS = {
    "black": (20, 20, 24),
    "blue": (30, 60, 190),
    "red": (190, 30, 30),
    "green": (20, 110, 50),
    "purple": (110, 40, 140),
    "brown": (110, 66, 30),
}
PAPERS = {
    "white": (245, 245, 242),
    "cream": (242, 228, 190),
    "gray": (190, 190, 188),
    "blue": (196, 214, 236),
    "green": (200, 224, 196),
    "pink": (240, 206, 208),
}
_INKS, _PAPERS = (np.array(list(colors.values()), dtype=np.float32) for colors in (INKS, PAPERS))
_DRAWS = 64  # uniform numbers a scene may use


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
        """Pickle without the bitmaps, which each process reads again from the cache folder."""
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
        """Read captions without drawing the scenes."""
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
            choices = (
                f"{with_article(ink)} {name} on {paper}",
                f"the character {name}, written in {ink}",
                f"{paper} with {with_article(ink)} {name}",
                f"a picture of {with_article(name)} in {ink} on {paper}",
            )
        else:
            small = scenes.written[0]
            beside = f"a small {tuple(INKS)[small.ink[i]]} {self._name(small, i)}"
            where = _relation(main.x[i] - small.x[i], main.y[i] - small.y[i])
            choices = (
                f"a large {ink} {name} {where} {beside}",
                f"several characters on {paper}, the largest is {with_article(ink)} {name}",
                f"a large {name} in {ink} on {paper}, {where} {beside}",
                f"{with_article(ink)} {name} {where} {beside}, on {paper}",
            )
        return choices[order], choices[(order + 1) % len(choices)]

    def _name(self, written: Written, i: int) -> str:
        return class_name(self._glyphs.characters[written.label[i]])


def class_name(character: str) -> str:
    """Return Unicode's name in lower case; Chinese characters have none and are their own name."""
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


@dataclass
class Written:
    """One character in each of B scenes; all arrays are (B,)."""

    label: np.ndarray
    bitmap: np.ndarray
    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray
    angle: np.ndarray
    stretch: np.ndarray  # width over height, beside the font's own
    slant: np.ndarray
    ink: np.ndarray


@dataclass
class Scenes:
    """Describe all that B pictures show; the labelled character is the largest, and the last that is drawn.

    Captions speak of it and of the first companion.
    """

    written: list[Written]
    paper: np.ndarray  # (B,)
    light: np.ndarray  # (B, 3): gain, slope across, slope up
    noise: np.ndarray  # (B, 2): strength, where in the table


def compose(
    glyphs: Glyphs, labels: np.ndarray, others: np.ndarray, faces: int, scene: str, key: int, indices: np.ndarray
) -> Scenes:
    """Draw scenes for classes (B,) from (key, index) alone; `others` are the classes companions are taken from."""
    dice = Dice(uniforms(key, indices, _DRAWS))
    paper = dice.pick(len(PAPERS))
    radius = dice.span(*RADII[scene])
    x, y = (dice.span(-1, 1) * (1 - radius) for _ in range(2))
    main = _written(dice, glyphs, labels, faces, x, y, radius)
    written = [main]
    if scene == "many":
        inward = np.arctan2(-y, -x)  # where the first companion stands: within the picture
        for k in range(COMPANIONS):
            label = others[dice.pick(len(others))]
            small = radius * dice.span(0.35, 0.6)
            angle = inward + 2 * np.pi / COMPANIONS * k + dice.span(-0.5, 0.5)
            away = (radius + small) * dice.span(1.05, 1.3)
            there = x + away * np.cos(angle), y + away * np.sin(angle)
            written.insert(-1, _written(dice, glyphs, label, faces, there[0], there[1], small))
    light = dice.spans((0.75, -0.2, -0.2), (1.05, 0.2, 0.2))
    return Scenes(written, paper, light, dice.spans((2, 0), (10, 2**16)))


def _written(
    dice: Dice, glyphs: Glyphs, labels: np.ndarray, faces: int, x: np.ndarray, y: np.ndarray, radius: np.ndarray
) -> Written:
    """Draw one character for each scene; `faces` is 0 for the fonts of training, 1 for those held out."""
    bitmap = glyphs.first[labels, faces] + dice.span(0, glyphs.count[labels, faces]).astype(np.int64)
    turn = np.pi / 18
    return Written(
        labels,
        bitmap,
        x,
        y,
        radius,
        dice.span(-turn, turn),
        dice.span(0.85, 1.15),
        dice.span(-0.2, 0.2),
        dice.pick(len(INKS)),
    )


def draw(glyphs: Glyphs, scenes: Scenes, size: int) -> np.ndarray:
    """Draw the scenes as (B, size, size, 3) uint8."""
    count = len(scenes.paper)
    planes = np.empty((3, count, size, size), dtype=np.float32)
    planes[:] = _PAPERS[scenes.paper].T[:, :, None, None]
    for written in scenes.written:
        _write(planes, glyphs, written, size)
    line = pixel_centers(size)
    gain, across, up = (as_column(column) for column in scenes.light.T)
    light = gain * (1 + across * line[None, None, :] - up * line[None, :, None])
    windows = noise_windows(size * size)
    strength, start = as_column(scenes.noise[:, 0]), scenes.noise[:, 1].astype(np.int64)
    pictures = np.empty((count, size, size, 3), dtype=np.uint8)
    for k, plane in enumerate(planes):
        np.multiply(plane, light, out=plane)
        plane += strength * windows[(start + k * 7919) % len(windows)].reshape(plane.shape)
        np.clip(plane, 0, 255, out=plane)
        pictures[..., k] = plane  # cuts off to whole numbers
    return pictures


def _write(planes: np.ndarray, glyphs: Glyphs, written: Written, size: int) -> None:
    """Blend one character into every picture, looking only at the square that it may touch."""
    reach = written.radius * 1.6  # a square of this radius, turned, stretched and slanted
    side = int(min(size, np.ceil(reach.max() * size) + 2))
    first = [
        ((middle + 1) * (size / 2) - side / 2).astype(np.int64).clip(0, size - side)
        for middle in (written.x, -written.y)
    ]
    columns, rows = (start[:, None] + np.arange(side) for start in first)
    inside, whose, cover = _cover(glyphs, written, pixel_centers(size)[columns], -pixel_centers(size)[rows], size)
    where = ((whose * size + rows.take(inside // side)) * size) + columns.take(whose * side + inside % side)
    for plane, shade in zip(planes.reshape(3, -1), _INKS.T, strict=True):
        there = plane.take(where)
        plane[where] = there + cover * (shade[written.ink].take(whose) - there)


def _cover(
    glyphs: Glyphs, written: Written, x: np.ndarray, y: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pixels that may have ink, the picture of each, and how much of it is ink.

    Pixels are flat indices into (B, rows, columns), for columns x and rows y. Ink is interpolated between four cells of
    the bitmap.
    """
    cells_a_pixel = FILLED / (written.radius * size)
    level = np.clip(np.floor(np.log2(cells_a_pixel) + 0.5), 0, len(LEVELS) - 1).astype(np.int64)
    sides = np.array(LEVELS)[level]
    per = sides / CELL * (FILLED / 2) / written.radius
    across, down = per * np.cos(written.angle), per * np.sin(written.angle)
    # cells from the middle: up, and right of the slanted upright
    up = [-down, across, down * written.x - across * written.y]
    right = [(a - written.slant * b) / written.stretch for a, b in zip([across, down], up, strict=False)]
    right.append(-right[0] * written.x - right[1] * written.y)
    x, y = x[:, None, :], y[:, :, None]
    u, v = (as_column(a) * x + (as_column(b) * y + as_column(c)) for a, b, c in (right, up))
    half = as_column(sides * (FILLED / CELL / 2) + 0.5)
    inside = np.flatnonzero((np.abs(u) < half) & (np.abs(v) < half))
    whose = inside // (u.shape[1] * u.shape[2])
    middle = (sides / 2 - 0.5).astype(np.float32).take(whose)
    u, v = middle + u.take(inside), middle - v.take(inside)
    left, top = u.astype(np.int64), v.astype(np.int64)
    u -= left.astype(np.float32)
    v -= top.astype(np.float32)
    line = sides.take(whose)
    start = (written.bitmap * BYTES + np.array(STARTS)[level]).take(whose) + top * line + left
    flat, below = glyphs.rows.reshape(-1), start + line
    upper, right_of, lower, corner = (flat.take(at).astype(np.float32) for at in (start, start + 1, below, below + 1))
    upper += (right_of - upper) * u
    lower += (corner - lower) * u
    return inside, whose, (upper + (lower - upper) * v) * np.float32(1 / 255)
