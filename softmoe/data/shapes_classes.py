"""What the classes of `shapes` are, and the sentences that describe a scene.

A class is a composition: an object (shape and texture) in an arrangement (a relation and a companion's
shape), for example "striped star above ring". Each of the 240 pairs of shape and texture has one or two of
the 24 arrangements: 360 classes. 260 are for upstream training; 100 are held out as downstream classes: none
is seen upstream, while each of their parts is. All relations survive a horizontal flip, so that flipping
keeps labels and captions true.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from softmoe.data.shapes_tables import COLORS, GROUNDS, OUTLINES, TEXTURES

SHAPES = tuple(OUTLINES)
TEXTURE_NAMES = tuple(TEXTURES)
RELATIONS = ("above", "below", "beside", "behind")
COMPANIONS = ("disk", "square", "triangle", "cross", "heart", "hourglass")
COLOR_NAMES = tuple(COLORS)
GROUND_NAMES = tuple(GROUNDS)
_CLASSES = 360
_DOWNSTREAM = 100
CLASS_SETS = ("upstream", "downstream", "all")


@dataclass(frozen=True)
class Composition:
    """Indices into the tuples above."""

    shape: int
    texture: int
    relation: int
    companion: int

    @property
    def name(self) -> str:
        return (
            f"{TEXTURE_NAMES[self.texture]} {SHAPES[self.shape]} "
            f"{RELATIONS[self.relation]} {COMPANIONS[self.companion]}"
        )


@cache
def compositions(which: str) -> tuple[Composition, ...]:
    """The classes of one set, the same for ever: label i is entry i."""
    rng = np.random.Generator(np.random.Philox(key=2308))
    pairs = [(s, t) for s in range(len(SHAPES)) for t in range(len(TEXTURE_NAMES))]
    doubled = set(rng.permutation(len(pairs))[: _CLASSES - len(pairs)].tolist())
    classes = []
    for k, (shape, texture) in enumerate(pairs):
        # two arrangements of one pair differ in relation and in companion
        relations = rng.permutation(len(RELATIONS))[: 1 + (k in doubled)]
        companions = rng.permutation(len(COMPANIONS))[: len(relations)]
        classes += [
            Composition(shape, texture, int(r), int(c)) for r, c in zip(relations, companions, strict=True)
        ]
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
    "a {texture} {shape} {relation} a small {companion}, on {ground}",
    "a {color} {texture} {shape} {relation} a {companion_color} {companion} on {ground}",
    "on {ground}, there is a {texture} {shape} {relation} a {companion}",
    "a picture of a {color} {shape} with a {texture} pattern {relation} a small {companion}",
    "a {texture} {color} {shape}, {relation} a {companion_color} {companion}",
    "{ground} with a {texture} {shape} {relation} a little {companion_color} {companion}",
)
_SPOKEN_VOWELS = ("a", "e", "i", "o", "u", "hour")


def captions(words: Words, draw: int, count: int = 2) -> tuple[str, ...]:
    """`count` different sentences about a scene, chosen by the whole number `draw`."""
    first = draw % len(_PATTERNS)
    step = 1 + draw // 7 % (len(_PATTERNS) - 1)
    synonyms = _RELATION_WORDS[words.relation]
    said = []
    for k in range(count):
        pattern = _PATTERNS[(first + k * step) % len(_PATTERNS)]
        facts = vars(words) | {"relation": synonyms[(draw // 64 + k) % len(synonyms)]}
        said.append(_articles(pattern.format(**facts)))
    return tuple(said)


def _articles(sentence: str) -> str:
    words = sentence.split(" ")
    for i in range(len(words) - 1):
        if words[i] == "a" and words[i + 1].startswith(_SPOKEN_VOWELS):
            words[i] = "an"
    return " ".join(words)
