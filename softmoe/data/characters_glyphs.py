"""Draw bitmaps of characters from font files, once, and keep them in the cache folder.

A class is a character. It is drawn from every face (font file) that has it, scaled so that its longer side fills the
cell: how large a character is within its line says nothing here. Characters that look the same then, such as the Latin,
Greek and Cyrillic A, are one class, the first of them.
"""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from softmoe.data.order import mix64
from softmoe.data.source import fingerprint
from softmoe.paths import cache_folder
from softmoe.storage.files import whole_file

CELL, FILLED = 40, 32  # pixels a side of a bitmap, and of the longer side of the character in its middle
LEVELS = (CELL, CELL // 2, CELL // 4)  # every bitmap is kept at three sizes, for pictures in which it is small
STARTS = (0, CELL**2, CELL**2 + (CELL // 2) ** 2)
BYTES = sum(side**2 for side in LEVELS)
DOWNSTREAM = 100  # classes that are never among the upstream ones
_ALIKE = 0.9  # correlation of two bitmaps above which a reader may take one for the other
_LEAST_SEEN, _LEAST_UNSEEN = 3, 1  # faces that a class must have
_VERSION = "1"
_FONT_SIZE = 48  # at which a character is drawn before it is scaled to the cell
_KINDS = ("Lu", "Ll", "Lt", "Lo", "Nd", "Nl", "No", "Sm", "So", "Sc")  # letters, numbers, symbols
_FAMILIES = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "STIXGeneral")
_IDEOGRAPHS = range(0x4E00, 0xA000)
_BRAILLE = range(0x2800, 0x2900)  # dots on a grid: told apart by places that scaling does not keep
_SYSTEM = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts", "/Library/Fonts")
_SYSTEM += ("/System/Library/Fonts", "C:/Windows/Fonts")


@dataclass(frozen=True)
class Glyphs:
    """The classes of one set of fonts, and their bitmaps.

    `rows` has a row of BYTES for every bitmap; those of class c are first[c, k] up to first[c, k] + count[c, k], k = 0
    for the faces that are seen in training and 1 for the others.
    """

    characters: str
    rows: np.ndarray
    first: np.ndarray
    count: np.ndarray
    digest: str


@dataclass(frozen=True)
class Face:
    """A font file and the code points that it has."""

    path: Path
    has: frozenset[int]

    def draw(self, character: int) -> np.ndarray:
        """Draw a character as (CELL, CELL) uint8, all zero where the font has an empty glyph."""
        canvas = Image.new("L", (3 * _FONT_SIZE, 3 * _FONT_SIZE))
        middle = 3 * _FONT_SIZE // 2
        ImageDraw.Draw(canvas).text((middle, middle), chr(character), fill=255, font=_font(self.path), anchor="mm")
        picture = np.asarray(canvas)
        cell = np.zeros((CELL, CELL), dtype=np.uint8)
        down, across = np.flatnonzero(picture.any(1)), np.flatnonzero(picture.any(0))
        if not down.size:
            return cell
        picture = picture[down[0] : down[-1] + 1, across[0] : across[-1] + 1]
        height, width = (max(1, round(side * FILLED / max(picture.shape))) for side in picture.shape)
        scaled = Image.fromarray(picture).resize((width, height), Image.Resampling.HAMMING)
        top, left = (CELL - height) // 2, (CELL - width) // 2
        cell[top : top + height, left : left + width] = np.asarray(scaled)
        return cell


@cache
def _font(path: Path) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), _FONT_SIZE)


@cache
def load(fonts: str, classes: int | None) -> Glyphs:
    """Load the downstream classes and the first `classes` upstream ones (None: all) of a set of fonts."""
    files = font_files(fonts)
    key = fingerprint(_VERSION, str(features.version("freetype2")), fonts, str(classes), *map(_digest, files))
    kept = cache_folder() / "characters" / f"{key}.npz"
    if not kept.is_file():
        table: dict[str, Any] = _make(_faces(tuple(files)), fonts, classes)
        with whole_file(kept) as file:
            np.savez(file, **table)
    with np.load(kept) as table:
        characters = "".join(map(chr, table["characters"]))
        return Glyphs(characters, table["rows"], table["first"], table["count"], key)


def font_files(fonts: str) -> list[Path]:
    """Find the font files in matplotlib, those of the system with Chinese characters (cjk), or those of a folder."""
    if fonts == "matplotlib":
        folder = _matplotlib_folder()
        return [
            path for family in _FAMILIES for path in sorted(folder.glob(f"{family}*.ttf")) if _in_family(path, family)
        ]
    if fonts == "cjk":
        found = [path for folder in _SYSTEM for path in _files(Path(folder).expanduser())]
        found = [face.path for face in _faces(tuple(found)) if len(face.has & set(_IDEOGRAPHS)) > 5000]
        if len(found) < _LEAST_SEEN + _LEAST_UNSEEN:
            raise ValueError(
                f"characters?fonts=cjk found {len(found)} fonts with Chinese characters and needs four; install some, "
                "for example with: apt-get install fonts-noto-cjk fonts-wqy-zenhei fonts-arphic-ukai"
            )
        return found
    if not Path(fonts).is_dir():
        raise ValueError(
            f"The option fonts must be matplotlib, cjk or a folder with fonts; there is no folder {fonts}."
        )
    return _files(Path(fonts))


def _in_family(path: Path, family: str) -> bool:
    """Tell if a file is of the family: DejaVuSansMono and DejaVuSansDisplay are not of DejaVuSans."""
    return path.stem.removeprefix(family)[:1] in ("", "-") or (family.startswith("STIX") and "Gen" in path.stem)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".ttf", ".otf", ".ttc"))


def _matplotlib_folder() -> Path:
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "The source characters draws with the fonts inside matplotlib: pip install 'softmoe-vit[plots]', or name a "
            "folder with fonts, characters?fonts=FOLDER."
        ) from None
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@cache
def _faces(files: tuple[Path, ...]) -> list[Face]:
    """Open every file, the one with most characters first: it decides which characters look alike."""
    try:
        from fontTools.ttLib import TTFont
    except ImportError:
        raise ValueError(
            "Reading fonts needs fontTools, which matplotlib brings: pip install 'softmoe-vit[plots]'"
        ) from None
    faces = []
    for path in files:
        with TTFont(path, fontNumber=0, lazy=True) as font:
            faces.append(Face(path, frozenset(font.getBestCmap() or ())))
    widest = max(faces, key=lambda face: len(face.has), default=None)
    return sorted(faces, key=lambda face: face is not widest)


@cache
def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()


def _make(faces: list[Face], fonts: str, classes: int | None) -> dict[str, np.ndarray]:
    """Choose the classes and draw them; every fourth face is held out of training."""
    parts = [[f for i, f in enumerate(faces) if i % 4 != 3], [f for i, f in enumerate(faces) if i % 4 == 3]]
    chosen = _distinct(faces[0], _candidates(parts, fonts == "cjk"), classes)
    rows, first, count = [], np.zeros((len(chosen), 2), np.int64), np.zeros((len(chosen), 2), np.int64)
    for c, character in enumerate(chosen):
        for k, part in enumerate(parts):
            drawn = [face.draw(character) for face in part if character in face.has]
            first[c, k], count[c, k] = len(rows), len(drawn)
            rows.extend(_levels(cell) for cell in drawn)
    return {"characters": np.array(chosen), "rows": np.stack(rows), "first": first, "count": count}


def _candidates(parts: list[list[Face]], ideographs: bool) -> list[int]:
    """List the characters that enough faces have, in an order that is random but the same for all sets of fonts."""
    least = zip(parts, (_LEAST_SEEN, _LEAST_UNSEEN), strict=True)
    enough = [{c for c in parts[0][0].has if sum(c in face.has for face in part) >= n} for part, n in least]

    def is_wanted(c: int) -> bool:
        return c in _IDEOGRAPHS if ideographs else unicodedata.category(chr(c)) in _KINDS and c not in _BRAILLE

    wanted = list(filter(is_wanted, sorted(enough[0] & enough[1])))
    order = np.argsort(mix64(np.array(wanted, dtype=np.uint64)), kind="stable")
    return [wanted[i] for i in order]


def _distinct(face: Face, candidates: list[int], classes: int | None) -> list[int]:
    """Choose the first characters, leaving out each that looks like one before it."""
    most = len(candidates) if classes is None else DOWNSTREAM + classes
    chosen, seen = [], np.zeros((len(candidates), (CELL // 2) ** 2), dtype=np.float32)
    for character in candidates:
        if len(chosen) == most:
            break
        cell = _half(face.draw(character)).astype(np.float32).ravel()
        cell -= cell.mean()
        length = np.linalg.norm(cell)
        if length == 0 or (len(chosen) and (seen[: len(chosen)] @ cell).max() > _ALIKE * length):
            continue
        seen[len(chosen)] = cell / length
        chosen.append(character)
    if classes is not None and len(chosen) < most:
        raise ValueError(
            f"These fonts have {max(0, len(chosen) - DOWNSTREAM)} upstream classes of characters that differ visibly, "
            f"fewer than {classes}."
        )
    return chosen


def _levels(cell: np.ndarray) -> np.ndarray:
    """Return the bitmap at the three sizes of LEVELS, as one row of BYTES."""
    half = _half(cell)
    return np.concatenate([cell.ravel(), half.ravel(), _half(half).ravel()]).astype(np.uint8)


def _half(cell: np.ndarray) -> np.ndarray:
    side = len(cell) // 2
    return cell.reshape(side, 2, side, 2).mean((1, 3)).round()
