"""Damaged images, to the one function that decodes all of them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing.cases import Case, Set, Wrong, encoded, pictures
from fuzzing.mutations import mutate_bytes
from PIL import Image


def image_seeds(_: Path) -> list[bytes]:
    first, *others = [Image.fromarray(p) for p in pictures()]
    exif = Image.Exif()
    exif[0x0112] = 6
    gray, palette, wide = first.convert("L"), first.quantize(16), Image.fromarray(np.arange(64, dtype=np.uint16)[None])
    found = [encoded(first, form) for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    found += [encoded(first, "JPEG", **o) for o in ({"progressive": True}, {"exif": exif}, {"quality": 30})]
    found += [encoded(first.convert("CMYK"), "JPEG"), encoded(gray, "JPEG"), encoded(first, "JPEG", subsampling=0)]
    found += [encoded(i, "PNG") for i in (gray, palette, wide, first.convert("RGBA"), first.convert("1"))]
    found += [encoded(first, form, save_all=True, append_images=others) for form in ("GIF", "WEBP", "TIFF", "PNG")]
    found += [encoded(first, "TIFF", compression=c) for c in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")]
    found += [encoded(first.convert("1"), "TIFF", compression="group4"), encoded(gray.convert("F"), "TIFF")]
    found += [encoded(palette, "BMP"), encoded(gray, "PPM"), encoded(first, "WEBP", lossless=True)]
    rle = b"\x05\x01\x00\x00" * 30 + b"\0\1"  # rows of one run each
    head = (40).to_bytes(4, "little") + (5).to_bytes(4, "little") + (30).to_bytes(4, "little") + b"\1\0\x08\0\1\0\0\0"
    found += [
        b"BM"
        + (0).to_bytes(8, "little")
        + (62).to_bytes(4, "little")
        + head
        + bytes(12)
        + b"\2\0\0\0" * 2
        + bytes(8)
        + rle
    ]
    return found


def image_make(rng: random.Random, seeds: list[bytes]) -> Case:
    data = mutate_bytes(rng, rng.choice(seeds))
    if rng.random() < 0.02:  # one within or behind another
        data += rng.choice(seeds)
    return Case({"image": data}, {"min_side": rng.choice((None, 1, 20, 64))})


def image_run(case: Case, _: Path, seeds: Any) -> str:
    from softmoe.data.decode import MAX_PIXELS, decode

    image = decode(case.files["image"], "image", case.call["min_side"])
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size > 3 * MAX_PIXELS:
        raise Wrong(f"an image of {image.shape} {image.dtype}")
    return "right"


IMAGES = Set(image_seeds, image_make, image_run, megabytes=1500)
