"""The transforms that bring images to the size of the model. All random draws come from the generator they are given.

The crop is chosen from the stored height and width before decoding (`Transform.plan`), so that a JPEG is decoded no
larger than the crop needs; it is kept as fractions of the image, which fit whatever size the decoder returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from softmoe.data.augment import rand_augment
from softmoe.data.decode import MAX_PIXELS, decode
from softmoe.storage.preprocessing import EVALUATION_CROPS

if TYPE_CHECKING:
    import torch

CROPS = ("inception", "resize", "central", "pad_crop")
_ASPECT = (3 / 4, 4 / 3)
_TRIES = 100


@dataclass(frozen=True)
class TransformConfig:
    """The settings of a transform.

    In evaluation only the size and `crop` matter; the random crops `inception` and `pad_crop` become `central` and
    `resize`.
    """

    image_size: int | tuple[int, int] = 224  # side, or (height, width)
    crop: str = "inception"  # inception | resize | central | pad_crop
    min_area: float = 0.05  # inception: the smallest share of the image's area that is cut out
    central_ratio: float = 256 / 224  # central: shorter side before the crop, over the image size
    pad: int = 4  # pad_crop: pixels of reflected border
    flip: bool = True
    rand_layers: int = 0  # RandAugment: how many operations, and how strong (0 to 30)
    rand_magnitude: float = 10.0
    erase: float = 0.0  # the chance that a random rectangle is filled with noise
    mixup: float = 0.0  # concentration of the Dirichlet distribution; 0 is off
    cutmix: float = 0.0  # the same of pasted rectangles; with both, each batch draws which of the two it gets
    antialias: bool = True  # False: plain bilinear sampling, as the paper's code does

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            raise ValueError(f"crop is one of {', '.join(CROPS)}, not {self.crop!r}.")
        if not 0 < self.min_area <= 1:
            raise ValueError(f"min_area is a share of the image in (0, 1], not {self.min_area}.")
        if min(self.size) < 1:
            raise ValueError(f"image_size must be positive, not {self.image_size}.")
        bounds = {"erase": (0, 1), "mixup": (0, 100), "cutmix": (0, 100), "pad": (0, 1000), "central_ratio": (1, 100)}
        for name, (least, most) in bounds.items():
            if not least <= getattr(self, name) <= most:  # also false for NaN
                raise ValueError(f"{name} is from {least} to {most}, not {getattr(self, name)}.")
        if not 0 <= self.rand_magnitude <= 30 or not 0 <= self.rand_layers <= 100:
            raise ValueError(
                f"RandAugment takes magnitudes from 0 to 30 and at most 100 layers, not {self.rand_magnitude} and "
                f"{self.rand_layers}."
            )

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width)."""
        return self.image_size if isinstance(self.image_size, tuple) else (self.image_size, self.image_size)


@dataclass(frozen=True)
class Plan:
    """A crop as fractions of the image (top, left, height, width), and the shorter side that decoding must keep."""

    box: tuple[float, float, float, float]
    min_side: int


WHOLE = (0.0, 0.0, 1.0, 1.0)


class Transform:
    """A configured transform: `transform(image, rng)` returns a (3, H, W) float32 tensor in [-1, 1]."""

    def __init__(self, config: TransformConfig, train: bool):
        self.config, self.train = config, train
        self.crop = config.crop if train else EVALUATION_CROPS.get(config.crop, config.crop)

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
        height, width = image.shape[:2]
        return to_tensor(self.apply(image, self.plan(height, width, rng), rng))

    def read(self, data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
        """Return (H, W, 3) uint8 from the image file in `data`, decoded no larger than needed."""
        rng = np.random.default_rng(0)  # evaluation draws nothing from it
        plans: list[Plan] = []

        def min_side(height: int, width: int) -> int:
            plans.append(self.plan(height, width, rng))
            return plans[0].min_side

        image = decode(data, name, min_side, max_pixels)
        return self.apply(image, plans[0], rng)

    def plan(self, height: int, width: int, rng: np.random.Generator) -> Plan:
        """Choose the crop for an image of this size."""
        target_height, target_width = self.config.size
        if self.crop == "inception":
            box = inception_crop(height, width, rng, self.config.min_area)
        elif self.crop == "central":
            box = _central_box(height, width, target_height, target_width, self.config.central_ratio)
        else:
            box = WHOLE
        # the decoded crop must have at least as many pixels each way as the result
        scale = max(target_height / (box[2] * height), target_width / (box[3] * width))
        return Plan(box, math.ceil(min(1.0, scale) * min(height, width)))

    def apply(self, image: np.ndarray, plan: Plan, rng: np.random.Generator) -> np.ndarray:
        """Return (H, W, 3) uint8 from an image of any resolution."""
        return self.apply_batch([image], [plan], [rng])[0]

    def apply_batch(self, images: list[np.ndarray], plans: list[Plan], rngs: list[np.random.Generator]) -> np.ndarray:
        """Return (B, H, W, 3) uint8. Each image has its own generator, so a batch equals its images one by one."""
        sized, mirrored = self.apply_raw(images, plans, rngs)
        if mirrored is not None:
            mirror(sized, mirrored)
        return sized

    def apply_raw(
        self, images: list[np.ndarray], plans: list[Plan], rngs: list[np.random.Generator]
    ) -> tuple[np.ndarray, list[bool] | None]:
        """Do what `apply_batch` does, but return which images are to be mirrored, unless RandAugment needs it done."""
        sized = np.empty((len(images), *self.config.size, 3), dtype=np.uint8)
        for place, image, plan in zip(sized, images, plans, strict=True):
            place[:] = self._resized(image, plan)
        mirrored = None
        if not self.train:
            return sized, None
        if self.crop == "pad_crop":
            sized = self._small_crops(sized, rngs)
        elif self.config.flip:
            mirrored = [rng.random() < 0.5 for rng in rngs]
        if self.config.rand_layers:
            if mirrored is not None:
                mirror(sized, mirrored)
                mirrored = None
            layers, strength = self.config.rand_layers, self.config.rand_magnitude
            pairs = zip(sized, rngs, strict=True)
            sized = np.stack([rand_augment(image, layers, strength, rng) for image, rng in pairs])
        return sized, mirrored

    def _small_crops(self, images: np.ndarray, rngs: list[np.random.Generator]) -> np.ndarray:
        """Pad, crop and flip (B, H, W, 3), with one copy per image."""
        draws = np.array([rng.random(3) for rng in rngs])
        pad = self.config.pad
        height, width = self.config.size
        padded = _pixels_of(np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect"))
        places = (draws[:, :2] * (2 * pad + 1)).astype(np.int64).tolist()
        mirrored = (self.config.flip & (draws[:, 2] < 0.5)).tolist()
        cut = np.empty(images.shape, dtype=np.uint8)
        pixels = _pixels_of(cut)
        for k, (top, left) in enumerate(places):
            part = padded[k, top : top + height, left : left + width]
            pixels[k] = part[:, ::-1] if mirrored[k] else part
        return cut

    def _resized(self, image: np.ndarray, plan: Plan) -> np.ndarray:
        area = self.crop == "central"  # the reference shrinks by area in evaluation, bilinearly in training
        return resize(image, self.config.size, plan.box, self.config.antialias, area, fast=self.train)


def _pixels_of(images: np.ndarray) -> np.ndarray:
    """Return a (..., H, W) view whose items are pixels of three bytes, which are mirrored three times as fast."""
    return images.view("V3")[..., 0]


def inception_crop(
    height: int, width: int, rng: np.random.Generator, min_area: float = 0.05
) -> tuple[float, float, float, float]:
    """Draw a box of `min_area` to all of the image's area and an aspect ratio of 3/4 to 4/3, as fractions of the image.

    Area and aspect are drawn uniformly until the box fits; if it never does, the box is the whole image.
    """
    for _ in range(_TRIES):
        area = rng.uniform(min_area, 1.0) * height * width
        aspect = rng.uniform(*_ASPECT)
        box_width, box_height = round(float(np.sqrt(area * aspect))), round(float(np.sqrt(area / aspect)))
        if 0 < box_width <= width and 0 < box_height <= height:
            top, left = rng.integers(0, height - box_height + 1), rng.integers(0, width - box_width + 1)
            return float(top / height), float(left / width), box_height / height, box_width / width
    return WHOLE


def _central_box(
    height: int, width: int, target_height: int, target_width: int, ratio: float
) -> tuple[float, float, float, float]:
    """Return the middle of an image whose shorter side was brought to `ratio` times the target."""
    scale = max(target_height / height, target_width / width) * ratio
    box_height, box_width = target_height / (height * scale), target_width / (width * scale)
    return (1 - box_height) / 2, (1 - box_width) / 2, box_height, box_width


def resize(
    image: np.ndarray,
    size: tuple[int, int],
    box: tuple[float, float, float, float] = WHOLE,
    antialias: bool = True,
    area: bool = False,
    fast: bool = False,
) -> np.ndarray:
    """Cut `box` out of (h, w, 3) uint8, to the nearest pixel, and resize it to `size` (height, width).

    `area` averages pixels when shrinking; otherwise it is bilinear, with or without antialiasing. `fast` uses torch's
    antialiased kernel, four times as fast as Pillow's and one level off in some pixels. Evaluation uses Pillow's, so
    that exported models can get the same pixels without torch.
    """
    height, width = image.shape[:2]
    if (height, width) == size and box == WHOLE:
        return image
    rows, columns = _pixels(box[0], box[2], height), _pixels(box[1], box[3], width)
    part = image[rows, columns]
    if area and part.shape[0] >= size[0] and part.shape[1] >= size[1]:
        return _filtered(part, size, Image.Resampling.BOX)
    if not antialias:
        return _sampled(part, size)
    if not fast:
        return _filtered(part, size, Image.Resampling.BILINEAR)
    import torch

    channels_last = torch.from_numpy(np.ascontiguousarray(part)).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(channels_last, size=size, mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _pixels(start: float, share: float, length: int) -> slice:
    """Return the whole pixels, at least one, of a start and a share of `length`."""
    first = min(round(start * length), length - 1)
    return slice(first, max(first + 1, min(round((start + share) * length), length)))


def _filtered(image: np.ndarray, size: tuple[int, int], resampling: Image.Resampling) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), resampling))


def _sampled(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Sample bilinearly at pixel centers, without averaging, rounded down to whole numbers."""

    def neighbors(count: int, length: int):
        place = np.clip((np.arange(count) + 0.5) * length / count - 0.5, 0, length - 1)
        low = place.astype(np.int64)
        return low, np.minimum(low + 1, length - 1), (place - low).astype(np.float32)

    r0, r1, down = neighbors(size[0], image.shape[0])
    c0, c1, across = neighbors(size[1], image.shape[1])
    across, down = across[None, :, None], down[:, None, None]
    upper = image[r0][:, c0] * (1 - across) + image[r0][:, c1] * across
    lower = image[r1][:, c0] * (1 - across) + image[r1][:, c1] * across
    return (upper * (1 - down) + lower * down).astype(np.uint8)


def mirror(images: np.ndarray, chosen: list[bool]) -> None:
    """Mirror the chosen images of (B, H, W, 3) left to right, in place."""
    pixels = _pixels_of(images)
    rows = np.flatnonzero(chosen)
    pixels[rows] = pixels[rows, :, ::-1]


def to_tensor(images: np.ndarray) -> torch.Tensor:
    """Convert (..., H, W, 3) uint8 to (..., 3, H, W) float32 in [-1, 1]."""
    import torch

    planes = np.empty((*images.shape[:-3], 3, *images.shape[-3:-1]), dtype=np.float32)
    for channel in range(3):
        np.multiply(images[..., channel], np.float32(2 / 255), out=planes[..., channel, :, :])
    planes -= 1
    return torch.from_numpy(planes)
