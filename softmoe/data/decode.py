"""Encoded bytes -> (h, w, 3) uint8 RGB, whatever the file holds, and no larger than asked for.

JPEG can be decoded at 1/2, 1/4 or 1/8 of its size for a fraction of the work (the inverse DCT is done on
fewer coefficients). simplejpeg does it faster than Pillow and is used when it is installed (`pip install
softmoe[fast]`).
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from softmoe.data.source import MinSide

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

_ORIENTATION = 0x0112  # the EXIF tag
_SIDEWAYS = (5, 6, 7, 8)  # its values that exchange height and width


class BrokenImage(ValueError):
    """An image that cannot be read: truncated, empty, or not an image at all."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"The image {self.name} cannot be read: {self.reason}."


def decode(data: bytes, name: str, min_side: MinSide = None) -> np.ndarray:
    """Decode an image file held in `data`. With `min_side` the result may be smaller than the file says, but
    its shorter side is at least `min_side` (or the file's own, if that is less)."""
    if not data:
        raise BrokenImage(name, "the file is empty")
    try:
        if simplejpeg is not None and data[:2] == b"\xff\xd8" and b"Exif" not in data[:4096]:
            image = _decode_simplejpeg(data, min_side)
            if image is not None:
                return image
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd EXIF and of large images: neither is our user's concern
            return _decode_pillow(data, min_side)
    except UnidentifiedImageError as error:  # whose own words name an object in memory
        raise BrokenImage(name, "it is not an image of a known format") from error
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error, ... on bad bytes
        raise BrokenImage(name, str(error).rstrip(".") or type(error).__name__) from error


def _decode_simplejpeg(data: bytes, min_side: MinSide) -> np.ndarray | None:
    """None where Pillow must do it: CMYK colors."""
    assert simplejpeg is not None
    tall, wide, space, _ = simplejpeg.decode_jpeg_header(data)
    if space in ("CMYK", "YCCK"):
        return None
    height, width = int(tall), int(wide)
    side = _wanted_side(min_side, height, width)
    # halves only, as Pillow: libjpeg could do other eighths, but more slowly than the whole
    factor = max((f for f in (2, 4, 8) if side and min(height, width) >= f * side), default=1)
    return simplejpeg.decode_jpeg(
        data, colorspace="RGB", min_height=-(-height // factor), min_width=-(-width // factor)
    )


def _decode_pillow(data: bytes, min_side: MinSide) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        orientation = image.getexif().get(_ORIENTATION, 1)
        width, height = image.size if orientation not in _SIDEWAYS else image.size[::-1]
        side = _wanted_side(min_side, height, width)
        if side and image.format == "JPEG":
            image.draft(image.mode, (side, side))
        upright = ImageOps.exif_transpose(image) if orientation != 1 else image
        return to_rgb(upright)


def _wanted_side(min_side: MinSide, height: int, width: int) -> int:
    """0 means full size."""
    return (min_side(height, width) if callable(min_side) else min_side) or 0


def to_rgb(image: Image.Image) -> np.ndarray:
    """(h, w, 3) uint8 from any Pillow mode. Transparent pixels lie on white; 16-bit and float grays are
    scaled to 8."""
    if image.mode.startswith("I;16"):
        gray = np.asarray(image).astype(np.uint32) >> 8
    elif image.mode in ("I", "F"):
        gray = _scale_gray(np.asarray(image).astype(np.float64))
    elif image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return np.array(Image.alpha_composite(white, rgba).convert("RGB"))
    else:
        return np.array(image.convert("RGB"))
    return np.repeat(gray.astype(np.uint8)[:, :, None], 3, axis=2)


def _scale_gray(values: np.ndarray) -> np.ndarray:
    """Pillow's wide gray modes do not say their range: the largest value tells it (1.0, 8 or 16 bits)."""
    top = values.max(initial=0.0)
    span = 255.0 if 1.0 < top <= 255.0 else 1.0 if top <= 1.0 and values.dtype.kind == "f" else 65535.0
    return np.clip(values / span * 255.0, 0, 255)
