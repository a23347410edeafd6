"""What the classes of `shapes` are, and the sentences that describe a scene.

A class is a composition: an object (color, texture, its second color, shape), its companion (color, shape)
and how they stand to each other, for example "red and white striped star above blue heart". Each of the 56
pairs of object and companion color has seven classes, which differ in texture and in shape: 392 in all. 288
are for upstream training; 104 are held out as downstream classes: none is seen upstream, while each of their
parts is. Colors are learned within seconds, textures and shapes slowly, so that a small model is early above
chance and long below the top. All relations survive a horizontal flip: flipping keeps labels and captions
true.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import NamedTuple

import numpy as np

from softmoe.data.shapes_tables import COLORS, GROUNDS, OUTLINES, TEXTURES

SHAPES = tuple(OUTLINES)
TEXTURE_NAMES = tuple(TEXTURES)
RELATIONS = ("above", "below", "beside", "behind")
COMPANIONS = ("disk", "square", "triangle", "cross", "heart", "hourglass")
COLOR_NAMES = tuple(COLORS)
GROUND_NAMES = tuple(GROUNDS)
PAINTS = COLOR_NAMES[:8]  # of objects and companions; white and black are the second colors of the textures
SECONDS = ("white", "black")
_EACH = 7  # classes of one pair of colors
_DOWNSTREAM = 104
CLASS_SETS = ("upstream", "downstream", "all")


class Composition(NamedTuple):
    """Indices into the tuples above."""

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
            f"{PAINTS[self.color]} and {SECONDS[self.second]} {TEXTURE_NAMES[self.texture]} "
            f"{SHAPES[self.shape]} "
            f"{RELATIONS[self.relation]} {PAINTS[self.companion_color]} {COMPANIONS[self.companion]}"
        )


@cache
def compositions(which: str) -> tuple[Composition, ...]:
    """The classes of one set, the same for ever: label i is entry i."""
    rng = np.random.Generator(np.random.Philox(key=2308))
    classes = []
    for color, companion_color in permutations(range(len(PAINTS)), 2):
        textures = rng.permutation(len(TEXTURE_NAMES))[:_EACH].tolist()
        shapes = rng.permutation(len(SHAPES))[:_EACH].tolist()
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
    """What a caption can say of one scene; all of it true of the picture."""

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
    """`count` different sentences about a scene, chosen by the whole number `draw`."""
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
