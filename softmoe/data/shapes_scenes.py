"""Define the classes of `shapes`, compose scenes that show them, and write sentences that describe a scene.

A class is a composition: an object (color, texture, its second color, shape), its companion (color, shape) and how they
stand to each other, for example "red and white striped star above blue heart". Each of the 56 pairs of object and
companion color has seven classes, which differ in texture and in shape: 392 in all. 288 are for upstream training; 104
are held out as downstream classes: none is seen upstream, while each of their parts is. Colors are learned within
seconds, textures and shapes slowly, so that a small model is early above chance and long below the top. All relations
survive a horizontal flip: flipping keeps labels and captions true.

A scene has objects, places, colors and light, drawn from (key, index) alone. Coordinates: the picture is
[-1, 1] x [-1, 1] with y up; radii are in the same units, so a scene does not depend on the number of pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from softmoe.data import shapes_tables as tables
from softmoe.data.order import Dice, uniforms
from softmoe.data.shapes_tables import CELLS, COLORS, GROUNDS, OUTLINES, TEXTURES

SHAPES = tuple(OUTLINES)
TEXTURE_NAMES = tuple(TEXTURES)
RELATIONS = ("above", "below", "beside", "behind")
COMPANIONS = ("disk", "square", "triangle", "cross", "heart", "hourglass")
COLOR_NAMES = tuple(COLORS)
GROUND_NAMES = tuple(GROUNDS)
PAINTS = COLOR_NAMES[:8]  # of objects and companions; white and black are the second colors of the textures
SECONDS = ("white", "black")
_CLASSES_PER_PAIR = 7  # of colors
_DOWNSTREAM = 104
CLASS_SETS = ("upstream", "downstream", "all")


class Composition(NamedTuple):
    """One class, as indices into the tuples above."""

    color: int
    second: int
    texture: int
    shape: int
    relation: int
    companion_color: int
    companion: int

    @property
    def name(self) -> str:
        return (
            f"{PAINTS[self.color]} and {SECONDS[self.second]} {TEXTURE_NAMES[self.texture]} {SHAPES[self.shape]} "
            f"{RELATIONS[self.relation]} {PAINTS[self.companion_color]} {COMPANIONS[self.companion]}"
        )


@cache
def compositions(which: str) -> tuple[Composition, ...]:
    """Return the classes of one set, which never change: label i is entry i."""
    rng = np.random.Generator(np.random.Philox(key=2308))
    classes = []
    for color, companion_color in permutations(range(len(PAINTS)), 2):
        textures = rng.permutation(len(TEXTURE_NAMES))[:_CLASSES_PER_PAIR].tolist()
        shapes = rng.permutation(len(SHAPES))[:_CLASSES_PER_PAIR].tolist()
        for texture, shape in zip(textures, shapes, strict=True):
            second, relation, companion = (int(rng.integers(len(x))) for x in (SECONDS, RELATIONS, COMPANIONS))
            classes.append(Composition(color, second, texture, shape, relation, companion_color, companion))
    held_out = set(rng.permutation(len(classes))[:_DOWNSTREAM].tolist())
    chosen = {
        "upstream": [c for i, c in enumerate(classes) if i not in held_out],
        "downstream": [c for i, c in enumerate(classes) if i in held_out],
        "all": classes,
    }
    return tuple(chosen[which])


@dataclass(frozen=True)
class Words:
    """The words that a caption can say of one scene; all of them true of the picture."""

    shape: str
    texture: str
    color: str
    second: str
    relation: str
    companion: str
    companion_color: str
    ground: str


_RELATION_WORDS = {
    "above": ("above", "over"),
    "below": ("below", "under"),
    "beside": ("beside", "next to"),
    "behind": ("behind", "in back of"),
}
_PATTERNS = (
    "{a_texture} {shape} {relation} a small {companion}, on {ground}",
    "{a_color} {texture} {shape} {relation} {a_companion_color} {companion} on {ground}",
    "on {ground}, there is {a_texture} {shape} {relation} {a_companion}",
    "a picture of {a_color} and {second} {shape} with {a_texture} pattern {relation} a small {companion}",
    "{a_texture} {shape} in {color} and {second}, {relation} {a_companion_color} {companion}",
    "{ground} with {a_texture} {shape} {relation} a little {companion_color} {companion}",
)
_SPOKEN_VOWELS = ("a", "e", "i", "o", "u", "hour")
_WITH_ARTICLE = ("texture", "color", "companion", "companion_color")


def sentences(words: Words, draw: int, count: int = 2) -> tuple[str, ...]:
    """Write `count` different sentences about a scene, chosen by the whole number `draw`."""
    first = draw % len(_PATTERNS)
    step = 1 + draw // 7 % (len(_PATTERNS) - 1)
    synonyms = _RELATION_WORDS[words.relation]
    chosen = ((first + k * step) % len(_PATTERNS) for k in range(count))
    return tuple(_sentence(words, which, synonyms[(draw // 64 + k) % len(synonyms)]) for k, which in enumerate(chosen))


@cache
def _sentence(words: Words, pattern: int, relation: str) -> str:
    articles = {f"a_{name}": with_article(getattr(words, name)) for name in _WITH_ARTICLE}
    return _PATTERNS[pattern].format_map(vars(words) | articles | {"relation": relation})


@cache
def with_article(word: str) -> str:
    return ("an " if word.startswith(_SPOKEN_VOWELS) else "a ") + word


_PEBBLES, _TWIGS = 3, 1
_OUTSIDE = 9.0  # a place that no picture shows
_DRAWS = 96  # uniform numbers a scene may use
_PALETTE = np.array([tables.COLORS[name] for name in COLOR_NAMES], dtype=np.float32)
_TWIG_COLORS = np.array([(92, 70, 48), (58, 50, 44), (150, 128, 100), (120, 120, 116)], dtype=np.float32)
_COMPANION_SHAPES = np.array([SHAPES.index(name) for name in COMPANIONS])
_CENTERED = np.array([centered for _, centered in tables.TEXTURES.values()])


def _visible_grounds() -> np.ndarray:
    """Return (colors, colors, colors, 4) the grounds on which a scene's three colors stand out: no green on grass."""
    ground = np.array([np.add(dark, light) / 2 for dark, light, _, _ in tables.GROUNDS.values()])
    apart = np.linalg.norm(_PALETTE[:, None] - ground[None], axis=2)
    worst = np.minimum(np.minimum(apart[:, None, None], apart[None, :, None]), apart[None, None, :])
    return np.argsort(-worst, axis=3, kind="stable")[..., :4]


_VISIBLE_GROUNDS = _visible_grounds()
_SECOND_COLORS = np.array([COLOR_NAMES.index(name) for name in SECONDS])


@dataclass
class Placed:
    """One object in each of B scenes. All arrays are (B,) but `color`, (B, 3)."""

    shape: np.ndarray
    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray
    angle: np.ndarray
    color: np.ndarray
    squeeze: np.ndarray | float = 1.0  # height over width, for twigs


@dataclass
class Scenes:
    """Describe all that B pictures show; `ground` is the one thing beside the class that captions name."""

    object: Placed
    companion: Placed
    pebbles: list[Placed]
    twigs: list[Placed]
    texture: np.ndarray
    second_color: np.ndarray  # (B, 3)
    texture_scale: np.ndarray
    texture_shift: np.ndarray  # (B, 2) in radii
    ground: np.ndarray
    ground_place: np.ndarray  # (B, 3): shift down, shift across, zoom
    light: np.ndarray  # (B, 3): gain, slope across, slope up
    noise: np.ndarray  # (B, 2): strength, where in the table


def compose(classes: np.ndarray, key: int, indices: np.ndarray, clutter: float = 1.0) -> Scenes:
    """Compose scenes for classes (B, 7) from random numbers that depend on (key, index) alone.

    `clutter` in [0, 1] scales all that makes a scene harder: pebbles, twigs, uneven light and noise.
    """
    dice = Dice(uniforms(key, indices, _DRAWS))
    color, second, texture, shape, relation, companion_color, companion = classes.T
    big, small = dice.span(0.48, 0.66), dice.span(0.20, 0.28)
    along, across = dice.span(0.85, 1.0) * (big + small), dice.span(-0.35, 0.35)
    side = np.where(dice.span(0, 1) < 0.5, -1.0, 1.0)
    is_ = {name: relation == i for i, name in enumerate(RELATIONS)}
    # where the companion is, seen from the object: "above" means that the object is above its companion
    dx = np.select([is_["beside"], is_["behind"]], [side * along, across * 0.4], across)
    dy = np.select([is_["above"], is_["below"], is_["beside"]], [-along, along, across], dice.span(-0.12, 0.12))
    x = _fit(dice, big, small, dx)
    y = _fit(dice, big, small, dy)
    ground = _VISIBLE_GROUNDS[color, _SECOND_COLORS[second], companion_color, dice.pick(4)]
    turn = np.pi / 9
    main = Placed(shape, x, y, big, dice.span(-turn, turn), _jittered(dice, color))
    angle, painted = dice.span(-turn, turn), _jittered(dice, companion_color)
    small_one = Placed(_COMPANION_SHAPES[companion], x + dx, y + dy, small, angle, painted)
    shift = dice.spans((0, 0), (0.5, 0.5)) * ~_CENTERED[texture][:, None]
    ground_place = dice.spans((0, 0, 0.7), (CELLS, CELLS, 1.3))
    light = dice.spans((-0.25, -0.3, -0.3), (0.15, 0.3, 0.3)) * clutter
    light[:, 0] += 1
    noise = dice.spans((2, 0), (9, 2**16)) * (clutter, 1)
    return Scenes(
        main,
        small_one,
        [_pebble(dice, clutter) for _ in range(_PEBBLES)],
        [_twig(dice, main, clutter) for _ in range(_TWIGS)],
        texture,
        _jittered(dice, _SECOND_COLORS[second]),
        dice.span(0.85, 1.15),
        shift,
        ground,
        ground_place,
        light,
        noise,
    )


def _fit(dice: Dice, big: np.ndarray, small: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Draw a place for the object such that it and its companion, at `offset` from it, lie within the picture."""
    low = np.maximum(-1 + big, -1 + small - offset) - 0.05
    high = np.minimum(1 - big, 1 - small - offset) + 0.05
    middle, half = (low + high) / 2, np.maximum(high - low, 0) / 2
    return middle + half * dice.span(-1, 1)


def _jittered(dice: Dice, color: np.ndarray) -> np.ndarray:
    return np.clip(_PALETTE[color] + dice.spans((-14,) * 3, (14,) * 3), 0, 255)


def _pebble(dice: Dice, clutter: float) -> Placed:
    shape, color = dice.pick(len(SHAPES)), _jittered(dice, dice.pick(len(_PALETTE)))
    x, y = np.where(dice.span(0, 1) < clutter, dice.span(-1, 1), _OUTSIDE), dice.span(-1, 1)
    return Placed(shape, x, y, dice.span(0.07, 0.14), dice.span(0, 2 * np.pi), color)


def _twig(dice: Dice, main: Placed, clutter: float) -> Placed:
    """Place a thin stick at the object's edge; half of them are put outside the picture, so they are absent."""
    where, present = dice.span(0, 2 * np.pi), dice.span(0, 1) < 0.5 * clutter
    reach = dice.span(0.5, 1.1) * main.radius
    x = np.where(present, main.x + reach * np.cos(where), _OUTSIDE)
    y = main.y + reach * np.sin(where)
    color = _TWIG_COLORS[dice.pick(len(_TWIG_COLORS))]
    shape = np.full(len(x), SHAPES.index("plank"))
    return Placed(shape, x, y, dice.span(0.4, 0.7), dice.span(0, np.pi), color, dice.span(0.14, 0.22))


def concatenated(layers: list[Placed]) -> Placed:
    """Put sets of objects behind each other: all of the first, then all of the second, and so on."""
    if len(layers) == 1:
        return layers[0]
    columns = {f.name: [getattr(one, f.name) for one in layers] for f in fields(Placed)}
    columns["squeeze"] = [np.broadcast_to(one.squeeze, one.x.shape) for one in layers]
    return Placed(**{name: np.concatenate(parts) for name, parts in columns.items()})


def select_rows(of: Any, rows: np.ndarray) -> Any:
    """Return the scenes or objects of some of the pictures."""
    if isinstance(of, np.ndarray):
        return of[rows]
    if isinstance(of, list):
        return [select_rows(one, rows) for one in of]
    if is_dataclass(of):
        return replace(of, **{f.name: select_rows(getattr(of, f.name), rows) for f in fields(of)})  # pyright: ignore[reportArgumentType]
    return of
