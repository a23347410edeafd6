"""Image files become the input of an exported model, with numpy and Pillow alone.

Written beside the model by `softmoe export`; it makes the pixels that `softmoe predict` makes. `preprocessing` is what
the model's .json holds under that name.

    from preprocess import load_image
    facts = json.load(open("model.onnx.json"))
    images = load_image("photo.jpg", facts["preprocessing"])    # (1, 3, height, width) float32 in [-1, 1]
"""

import math

import numpy as np
from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)  # the EXIF tag, and its values that exchange height and width


def load_image(file, preprocessing):
    """Return a path or an open binary file as (1, 3, height, width) float32; numpy.concatenate stacks several."""
    size = tuple(preprocessing["image_size"])
    with Image.open(file, formats=FORMATS) as image:
        orientation = image.getexif().get(_ORIENTATION, 1)
        width, height = image.size if orientation not in _SIDEWAYS else image.size[::-1]
        box = _box(height, width, size, preprocessing)
        if image.format == "JPEG":  # decoded at 1/2, 1/4 or 1/8, but no smaller than the crop needs
            scale = max(size[0] / (box[2] * height), size[1] / (box[3] * width))
            side = math.ceil(min(1.0, scale) * min(height, width))
            image.draft(image.mode, (side, side))
        pixels = _rgb(ImageOps.exif_transpose(image) if orientation != 1 else image)
    pixels = _resized(pixels, size, box, preprocessing)
    return pixels.transpose(2, 0, 1)[None].astype(np.float32) * np.float32(2 / 255) - 1


def _box(height, width, size, preprocessing):
    """Return the crop as shares of the image: top, left, height, width."""
    if preprocessing["crop"] != "central":
        return 0.0, 0.0, 1.0, 1.0
    scale = max(size[0] / height, size[1] / width) * preprocessing["central_ratio"]
    tall, wide = size[0] / (height * scale), size[1] / (width * scale)
    return (1 - tall) / 2, (1 - wide) / 2, tall, wide


def _resized(pixels, size, box, preprocessing):
    """Cut the crop out, to the nearest pixel, and resize it: by area if central and larger, else bilinearly."""
    height, width = pixels.shape[:2]
    part = pixels[_span(box[0], box[2], height), _span(box[1], box[3], width)]
    if part.shape[:2] == size:
        return part
    if preprocessing["crop"] == "central" and part.shape[0] >= size[0] and part.shape[1] >= size[1]:
        return np.asarray(Image.fromarray(part).resize(size[::-1], Image.Resampling.BOX))
    if preprocessing["antialias"]:
        return np.asarray(Image.fromarray(part).resize(size[::-1], Image.Resampling.BILINEAR))
    top, bottom, down = _neighbors(size[0], part.shape[0])
    left, right, across = _neighbors(size[1], part.shape[1])
    across, down = across[None, :, None], down[:, None, None]
    upper = part[top][:, left] * (1 - across) + part[top][:, right] * across
    lower = part[bottom][:, left] * (1 - across) + part[bottom][:, right] * across
    return (upper * (1 - down) + lower * down).astype(np.uint8)


def _span(start, share, length):
    first = min(round(start * length), length - 1)
    return slice(first, max(first + 1, min(round((start + share) * length), length)))


def _neighbors(count, length):
    place = np.clip((np.arange(count) + 0.5) * length / count - 0.5, 0, length - 1)
    low = place.astype(np.int64)
    return low, np.minimum(low + 1, length - 1), (place - low).astype(np.float32)


def _rgb(image):
    """Return (h, w, 3) uint8: transparent pixels lie on white, 16-bit and float grays are scaled to 8 bits."""
    if image.mode.startswith("I;16"):
        gray = np.asarray(image).astype(np.uint32) >> 8
    elif image.mode in ("I", "F"):
        values = np.nan_to_num(np.asarray(image).astype(np.float32))
        top = values.max(initial=0.0)
        gray = np.clip(values * (255.0 / (255.0 if 1 < top <= 255 else 1.0 if top <= 1 else 65535.0)), 0, 255)
    elif image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return np.array(Image.alpha_composite(white, rgba).convert("RGB"))
    else:
        return np.array(image.convert("RGB"))
    return np.repeat(gray.astype(np.uint8)[:, :, None], 3, axis=2)
