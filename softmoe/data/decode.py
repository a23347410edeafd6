"""Encoded bytes -> (h, w, 3) uint8 RGB, whatever the file holds, and no larger than asked for.

Every image of the package passes through `decode`: those of data sets, of files to predict or search, and of HTTP
requests. The bytes may be a stranger's, so the format is told by the content and is one of `FORMATS` (none of them
starts another program), and the sizes are checked before any pixel is made, in the decoder that makes them.

JPEG can be decoded at 1/2, 1/4 or 1/8 of its size for a fraction of the work (the inverse DCT is done on fewer
coefficients). simplejpeg does it faster than Pillow and is used when it is there (`pip install 'softmoe-vit[fast]'`).
"""

from __future__ import annotations

import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from softmoe.data.files import ByteReader
from softmoe.data.source import MinSide
from softmoe.storage.files import printable

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # Pillow's names; of animations the first frame
MAX_PIXELS = 50_000_000  # a few kilobytes can unpack to gigabytes
MAX_SIDE = 65_535  # JPEG's own limit; the work of some decoders grows with one side alone
MAX_BYTES = 400_000_000  # of a file: 50 million pixels of four 16-bit channels, uncompressed
MAX_SCANS = 100  # of a progressive JPEG, each a pass over all of it: encoders make about ten
MAX_SCANNED = 20 * MAX_PIXELS  # pixels times scans
MAX_SEGMENTS = 10_000  # of a JPEG before its pixels: with 64 KB each more than a file may have
MAX_CHUNKS = 100_000  # of a PNG: encoders put 8 KB or more into each
MAX_BLOCKS = 10_000  # of a GIF before its first picture
MAX_HEADER = 100_000  # bytes of a PPM's, with its comments
MAX_PLAIN = 5_000_000  # pixels of a PPM that are written as text
MAX_COMMENTS = 100
MAX_TABLE = 300_000  # numbers in a table of a TIFF: 65,535 strips of four colors are fewer

_UNCOMPRESSED = (".bmp", ".ppm", ".pgm", ".tif", ".tiff")
_SAMPLED, _SMALL = 64, 1_000_000  # so many files, of at most so many bytes, are read for a fingerprint
_ORIENTATION = 0x0112  # the EXIF tag
_SIDEWAYS = (5, 6, 7, 8)  # its values that exchange height and width
_TILE_WIDTH, _TILE_HEIGHT = 322, 323  # TIFF tags
_BYTES = (1, 2, 7)  # TIFF types whose values stay bytes
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # of a JPEG segment: neither data, filling nor a restart
_NO_LENGTH = frozenset([*range(2, 0xC0), 0xD8])
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15
_PROGRESSIVE = frozenset([0xC2, 0xC6, 0xCA, 0xCE])
_SCAN, _END, _APP1 = 0xDA, 0xD9, 0xE1
_TURNED = re.compile(rb'Exif\0|tiff:Orientation(="|>)[2-8]')  # EXIF, or XMP that gives an orientation
_COMMENTS = {b"\xff\xd8": b"Exif\0\0", b"P1": b"#", b"P2": b"#", b"P3": b"#"}  # how they begin, by the file's beginning


class BrokenImage(ValueError):
    """An image that cannot be read: truncated, empty, too large, or not an image at all."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"The image {printable(self.name)} cannot be read: {self.reason}."


class _Refused(Exception):
    """Raised by our own checks; the text is the reason of the BrokenImage."""


def read_image_file(path: Path, name: str, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes; BrokenImage for anything else, and for pipes at once."""
    try:
        flags = [getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")]
        handle = os.open(path, os.O_RDONLY | sum(flags))
        with open(handle, "rb") as file:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                raise BrokenImage(name, "it is not a regular file")
            if facts.st_size > most:
                raise BrokenImage(name, f"the file is larger than {most:,} bytes")
            return file.read(most)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        if isinstance(error, BrokenImage):
            raise
        raise BrokenImage(name, getattr(error, "strerror", None) or str(error)) from error


def read_member(archive: ByteReader, offset: int, size: int, name: str) -> bytes:
    """Return the bytes of an image within an archive, as `read_image_file` gives those of a file."""
    if size > MAX_BYTES:
        raise BrokenImage(name, f"the file is larger than {MAX_BYTES:,} bytes")
    try:
        return archive.read(offset, size)
    except OSError as error:
        raise BrokenImage(name, error.strerror or str(error)) from error


def is_uncompressed(name: str) -> bool:
    """Tell by its name if an image is as large whatever it shows, so that its size says nothing of it."""
    return name.lower().endswith(_UNCOMPRESSED)


def some_contents(read: Callable[[int], bytes], files: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the contents of some of the small ones among files (number, bytes), for the fingerprint of a source.

    It is for files whose names and sizes do not tell variants of a set apart.
    """
    small = [number for number, size in files if size <= _SMALL]
    for number in small[:: -(-len(small) // _SAMPLED) or 1]:
        try:
            yield read(number)
        except BrokenImage as error:
            yield error.reason.encode()


def decode(data: bytes, name: str, min_side: MinSide = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode an image file held in `data`.

    With `min_side` the result may be smaller than the file says, but its shorter side is at least `min_side` (or the
    file's own, if that is less). BrokenImage, whose `reason` speaks of the image only, for a file that is not one of
    `FORMATS`, is damaged, or has more than `max_pixels`.
    """
    try:
        if not data:
            raise _Refused("the file is empty")
        if len(data) > MAX_BYTES:
            raise _Refused(f"the file is larger than {MAX_BYTES:,} bytes")
        if data[:2] == b"\xff\xd8":
            may_be_turned = _check_jpeg(data, max_pixels)
            if simplejpeg is not None and not may_be_turned:
                image = _decode_simplejpeg(data, min_side, max_pixels)
                if image is not None:
                    return image
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd EXIF and of large images: neither is our user's concern
            return _decode_pillow(data, min_side, max_pixels)
    except _Refused as error:
        raise BrokenImage(name, str(error)) from error
    except UnidentifiedImageError as error:
        raise BrokenImage(name, "it is not an image of a known format (JPEG, PNG, WebP, GIF, BMP, TIFF)") from error
    except Image.DecompressionBombError as error:
        raise BrokenImage(name, f"it has too many pixels: {max_pixels:,} are allowed") from error
    except MemoryError as error:
        raise BrokenImage(name, "there is not enough memory to decode it") from error
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error, ... on bad bytes
        raise BrokenImage(name, _reason(error)) from error


def _reason(error: Exception) -> str:
    """Return the decoder's message if it is meant for people: one line without names of files or objects."""
    said = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    plain = isinstance(error, (OSError, ValueError, SyntaxError)) and len(said) <= 120 and not set(said) & set("/<>\\")
    return said if said and plain else "its data is damaged"


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise _Refused(f"it has too many pixels: {width} x {height}, {max_pixels:,} are allowed")
    if max(width, height) > MAX_SIDE:
        raise _Refused(f"it is too long: {width} x {height}, a side may have {MAX_SIDE:,} pixels")


def _check_jpeg(data: bytes, max_pixels: int) -> bool:
    """Refuse a JPEG of too many pixels or scans, by its markers, which are found as libjpeg finds them.

    In a sequential JPEG libjpeg takes no scan after one that holds all colors, so the search ends there: photos take
    microseconds. Returns whether the image may have to be turned: EXIF or XMP may say so, and Pillow heeds both.
    """
    place, pixels, colors, many, scans, segments, turned = 2, 0, 0, False, 0, 0, False
    while (found := _MARKER.search(data, place)) is not None:
        marker, place, segments = found[1][0], found.end(), segments + 1
        if segments > MAX_SEGMENTS:
            raise _Refused(f"it has more than {MAX_SEGMENTS:,} segments")
        if marker == _END:
            break
        if marker in _NO_LENGTH or len(data) < place + 2:
            continue
        if marker in _FRAMES and len(data) >= place + 8:
            height, width = int.from_bytes(data[place + 3 : place + 5]), int.from_bytes(data[place + 5 : place + 7])
            _check_size(width, height, max_pixels)
            pixels, colors = max(pixels, width * height), data[place + 7]
            many = many or marker in _PROGRESSIVE
        elif marker == _SCAN:
            scans += 1
            if not many and data[place + 2 : place + 3] == bytes([colors]):
                break
            if scans > MAX_SCANS or scans * pixels > MAX_SCANNED:
                raise _Refused(f"it has too many scans: {MAX_SCANS} are allowed, fewer where it is large")
            many = True
        end = place + max(2, int.from_bytes(data[place : place + 2]))
        turned = turned or (marker == _APP1 and _TURNED.search(data, place, end) is not None)
        place = end
    return turned


def _check_png(data: bytes) -> None:
    """Refuse a PNG of too many chunks, each of which Pillow looks at."""
    place = 8
    for _ in range(MAX_CHUNKS):
        if place >= len(data):
            return
        place += 12 + int.from_bytes(data[place : place + 4])
    raise _Refused(f"it has more than {MAX_CHUNKS:,} chunks")


def _check_gif(data: bytes) -> None:
    """Refuse a GIF of too many blocks before its first picture: Pillow keeps the comments in them."""
    place = 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 128 else 0)
    for _ in range(MAX_BLOCKS):
        match data[place : place + 1]:
            case b"!":
                place += 2
            case b"," | b";" | b"":
                return
            case size:
                place += 1 + size[0]
    raise _Refused(f"it has more than {MAX_BLOCKS:,} blocks before its first picture")


def _check_ppm(data: bytes) -> None:
    """Refuse a PPM with a long header, or of many numbers as text: Pillow reads both byte by byte."""
    parts = re.sub(rb"#[^\r\n]*[\r\n]?", b"", data[:MAX_HEADER]).split(None, 4)
    if len(parts) < (3 if data[:2] in (b"P1", b"P4") else 4):
        raise _Refused("its header is not whole or too long")
    if data[:2] in (b"P1", b"P2", b"P3") and parts[1].isdigit() and parts[2].isdigit():
        _check_size(int(parts[1][:9]), int(parts[2][:9]), MAX_PLAIN)


def _check_comments(data: bytes) -> None:
    """Refuse a file with many comments: for each of them Pillow copies those before it."""
    if data[:2] in _COMMENTS and data.count(_COMMENTS[data[:2]]) > MAX_COMMENTS:
        raise _Refused(f"it has more than {MAX_COMMENTS} comments")


def _check_tables(data: bytes) -> None:
    """Refuse a TIFF with long tables in its first picture: Pillow makes an object of each number."""
    order, wide = ("little" if data[:2] == b"II" else "big"), data[2:3] == b"+"

    def number(place: int, size: int) -> int:
        return int.from_bytes(data[place : place + size], order)

    word, entry = (8, 20) if wide else (4, 12)
    start = number(word, word)
    first = start + (8 if wide else 2)
    count = min(number(start, first - start), 1 << 16)  # tables: there are no more tags
    for place in range(first, first + entry * count, entry):
        if count == 1 << 16 or (number(place + 2, 2) not in _BYTES and number(place + 4, word) > MAX_TABLE):
            raise _Refused("one of its tables is too long")


def _decode_simplejpeg(data: bytes, min_side: MinSide, max_pixels: int) -> np.ndarray | None:
    """Decode a JPEG with simplejpeg; None for CMYK colors, which Pillow must decode."""
    assert simplejpeg is not None
    tall, wide, space, _ = simplejpeg.decode_jpeg_header(data)
    if space in ("CMYK", "YCCK"):
        return None
    height, width = int(tall), int(wide)
    _check_size(width, height, max_pixels)
    side = _wanted_side(min_side, height, width)
    # halves only, as Pillow: libjpeg could do other eighths, but more slowly than the whole
    factor = max((f for f in (2, 4, 8) if side and min(height, width) >= f * side), default=1)
    return simplejpeg.decode_jpeg(
        data, colorspace="RGB", min_height=-(-height // factor), min_width=-(-width // factor)
    )


def _decode_pillow(data: bytes, min_side: MinSide, max_pixels: int) -> np.ndarray:
    _check_comments(data)
    for start, check in _CHECKS.items():
        if data.startswith(start):
            check(data)
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        _check_size(*image.size, max_pixels)  # before anything asks for more than the header, as EXIF may
        if image.format == "TIFF":
            _check_tiles(image, max_pixels)
        orientation = image.getexif().get(_ORIENTATION, 1)
        width, height = image.size if orientation not in _SIDEWAYS else image.size[::-1]
        side = _wanted_side(min_side, height, width)
        if side and image.format == "JPEG":
            image.draft(image.mode, (side, side))
        upright = ImageOps.exif_transpose(image) if orientation != 1 else image
        return to_rgb(upright)


_CHECKS = {b"II": _check_tables, b"MM": _check_tables, b"\x89PNG": _check_png, b"GIF8": _check_gif, b"P": _check_ppm}


def _check_tiles(image: Image.Image, max_pixels: int) -> None:
    """Refuse a TIFF with large tiles: a tile may be far larger than the image, and is decoded whole."""
    tags = getattr(image, "tag_v2", {})
    sides = [tags.get(tag, 0) for tag in (_TILE_WIDTH, _TILE_HEIGHT)]
    if not all(isinstance(side, int) for side in sides) or sides[0] * sides[1] > max_pixels:
        raise _Refused("its tiles are too large")


def _wanted_side(min_side: MinSide, height: int, width: int) -> int:
    """Return the shorter side that decoding must keep; 0 means full size."""
    return (min_side(height, width) if callable(min_side) else min_side) or 0


def to_rgb(image: Image.Image) -> np.ndarray:
    """Make (h, w, 3) uint8 from any Pillow mode. Transparent pixels lie on white; 16-bit and float grays are scaled."""
    if image.mode.startswith("I;16"):
        gray = np.asarray(image).astype(np.uint32) >> 8
    elif image.mode in ("I", "F"):
        gray = _scale_gray(np.nan_to_num(np.asarray(image).astype(np.float32)))
    elif image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return np.array(Image.alpha_composite(white, rgba).convert("RGB"))
    else:
        return np.array(image.convert("RGB"))
    return np.repeat(gray.astype(np.uint8)[:, :, None], 3, axis=2)


def _scale_gray(values: np.ndarray) -> np.ndarray:
    """Scale grays to 0..255 by their largest value (1.0, 8 or 16 bits), since Pillow does not tell the range."""
    top = values.max(initial=0.0)
    span = 255.0 if 1.0 < top <= 255.0 else 1.0 if top <= 1.0 else 65535.0
    values *= 255.0 / span
    return np.clip(values, 0, 255, out=values)
