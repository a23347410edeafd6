"""Training images changed at random.

RandAugment (Cubuk et al., 2019) changes one image, an (h, w, 3) uint8 array. The others change the images of a batch,
(B, 3, H, W) float32 on any device, with the same result everywhere: random erasing (Zhong et al., 2017) fills a
rectangle of some with noise, mixup and cutmix blend each with those that follow it, and their labels alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

if TYPE_CHECKING:
    import torch

_TOP = 30.0  # the largest magnitude
_GRAY = (128, 128, 128)  # fills what a rotation or shift uncovers
_NOISE_STARTS = 1 << 16  # places of the sequence of noise where that of an image may begin

Operation = Callable[[Image.Image, float, np.random.Generator], Image.Image]  # (image, strength 0..1, rng)


def rand_augment(image: np.ndarray, layers: int, magnitude: float, rng: np.random.Generator) -> np.ndarray:
    """Apply `layers` operations, each drawn from the sixteen below, all at strength `magnitude` / 30."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    for _ in range(layers):
        operation = _OPERATIONS[int(rng.integers(len(_OPERATIONS)))]
        picture = operation(picture, magnitude / _TOP, rng)
    return np.asarray(picture)


def _sign(value: float, rng: np.random.Generator) -> float:
    return value if rng.random() < 0.5 else -value


def _affine(picture: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=_GRAY)


def _shear_x(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    shear = _sign(0.3 * strength, rng)
    return _affine(picture, (1, shear, -shear * picture.height / 2, 0, 1, 0))


def _shear_y(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    shear = _sign(0.3 * strength, rng)
    return _affine(picture, (1, 0, 0, shear, 1, -shear * picture.width / 2))


def _shift_x(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    return _affine(picture, (1, 0, _sign(0.45 * strength * picture.width, rng), 0, 1, 0))


def _shift_y(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    return _affine(picture, (1, 0, 0, 0, 1, _sign(0.45 * strength * picture.height, rng)))


def _rotate(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    return picture.rotate(_sign(30 * strength, rng), Image.Resampling.BILINEAR, fillcolor=_GRAY)


def _posterize(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.posterize(picture, 8 - round(4 * strength))


def _solarize(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.solarize(picture, 256 - round(256 * strength))


def _solarize_add(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    add = round(110 * strength)
    return picture.point([min(255, v + add) if v < 128 else v for v in range(256)] * 3)


def _enhance(kind: type) -> Operation:
    def operation(picture: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
        return kind(picture).enhance(1 + _sign(0.9 * strength, rng))

    return operation


_OPERATIONS: tuple[Operation, ...] = (
    lambda picture, strength, rng: picture,
    lambda picture, strength, rng: ImageOps.autocontrast(picture),
    lambda picture, strength, rng: ImageOps.equalize(picture),
    lambda picture, strength, rng: ImageOps.invert(picture),
    _rotate,
    _posterize,
    _solarize,
    _solarize_add,
    _enhance(ImageEnhance.Color),
    _enhance(ImageEnhance.Contrast),
    _enhance(ImageEnhance.Brightness),
    _enhance(ImageEnhance.Sharpness),
    _shear_x,
    _shear_y,
    _shift_x,
    _shift_y,
)


@dataclass(frozen=True)
class Rectangle:
    """Rows from top up to bottom, columns from left up to right."""

    top: int
    bottom: int
    left: int
    right: int


def draw_erasing(size: tuple[int, int], chance: float, rngs: list[np.random.Generator]) -> np.ndarray:
    """Draw (E, 6) int64, a row for each image that is erased.

    A row is the image's number, top, bottom, left and right of a rectangle of 2-33 % of the area and aspect 0.3-3.3,
    and where in the sequence of noise its own begins.
    """
    height, width = size
    rows = []
    for k, rng in enumerate(rngs):
        if rng.random() >= chance:
            continue
        for _ in range(10):
            area = rng.uniform(0.02, 1 / 3) * height * width
            aspect = np.exp(rng.uniform(np.log(0.3), np.log(3.3)))
            box_height, box_width = round(float(np.sqrt(area * aspect))), round(float(np.sqrt(area / aspect)))
            if 0 < box_height < height and 0 < box_width < width:
                top, left = rng.integers(height - box_height + 1), rng.integers(width - box_width + 1)
                rows.append((k, top, top + box_height, left, left + box_width, rng.integers(_NOISE_STARTS)))
                break
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def erase(images: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Fill the rectangles that `draw_erasing` drew with noise of the 256 levels of a pixel."""
    import torch

    _, C, H, W = images.shape
    image, top, bottom, left, right, start = drawn[:, :, None].unbind(1)  # (E, 1) each
    row, column = torch.arange(H, device=images.device), torch.arange(W, device=images.device)
    inside_EHW = ((top <= row) & (row < bottom))[:, :, None] & ((left <= column) & (column < right))[:, None, :]
    noise_ECHW = _noise(_NOISE_STARTS + C * H * W, images.device).unfold(0, C * H * W, 1)[start[:, 0]].view(-1, C, H, W)
    which = image[:, 0]
    return images.index_copy(0, which, torch.where(inside_EHW[:, None], noise_ECHW, images[which]))


def _noise(count: int, device: torch.device) -> torch.Tensor:
    """Return the first of a sequence of random levels in [-1, 1], the same on every device.

    They are bits of place numbers, mixed by products below 2^63.
    """
    import torch

    bits = torch.arange(1, count + 1, device=device)
    for factor in (0x21F0AAAD, 0x735A2D97):
        bits = ((bits ^ (bits >> 15)) * factor) & 0xFFFFFFFF
    return ((bits >> 15) & 255).to(torch.float32).mul_(2 / 255).sub_(1)


def soft_labels(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Turn (B,) class numbers into (B, C) float32; what is float already is returned as it is."""
    import torch

    return labels if labels.is_floating_point() else torch.nn.functional.one_hot(labels, classes).to(torch.float32)


def mixup_weights(concentration: float, rng: np.random.Generator, size: int = 2) -> np.ndarray:
    """Draw (size,) float32 from a symmetric Dirichlet distribution, largest first: an image stays itself."""
    return np.sort(rng.dirichlet(np.full(size, concentration)))[::-1].astype(np.float32)


def mixup(
    images: torch.Tensor, targets: torch.Tensor, weights: np.ndarray | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blend each image with those that follow it in the batch, as the reference does.

    This is sum_i w_i * roll(x, -i) over the batch axis, of images (B, ...) and targets (B, C) alike.
    `weights` is (size,) for the whole batch, or (B, size) for each example its own.
    """
    import torch

    shares = torch.as_tensor(weights, dtype=images.dtype, device=images.device)
    if shares.ndim not in (1, 2) or (shares.ndim == 2 and len(shares) != len(images)):
        raise ValueError(f"mixup weights are (size,) or (batch, size), batch {len(images)}, not {tuple(shares.shape)}.")
    if len(targets) != len(images) or not targets.is_floating_point():
        raise ValueError(
            f"mixup needs one float target row per image, not {targets.dtype} {tuple(targets.shape)} "
            f"for {len(images)} images."
        )
    return _blend(images, shares), _blend(targets, shares.to(targets.dtype))


def draw_rectangle(size: tuple[int, int], concentration: float, rng: np.random.Generator) -> Rectangle:
    """Draw the rectangle that cutmix pastes, as in its paper: its share of the area is drawn from a beta distribution.

    It may lie anywhere, and is cut at the border.
    """
    height, width = size
    side = np.sqrt(rng.beta(concentration, concentration))
    row, column = rng.integers(height), rng.integers(width)
    top, bottom = (int(np.clip(row + sign * height * side / 2, 0, height)) for sign in (-1, 1))
    left, right = (int(np.clip(column + sign * width * side / 2, 0, width)) for sign in (-1, 1))
    return Rectangle(top, bottom, left, right)


def cutmix(images: torch.Tensor, targets: torch.Tensor, box: Rectangle) -> tuple[torch.Tensor, torch.Tensor]:
    """Paste a rectangle of the next image of the batch into each image, and blend the targets by the area.

    `images` are (B, 3, H, W), `targets` (B, C).
    """
    rows, columns = slice(box.top, box.bottom), slice(box.left, box.right)
    pasted = images.clone()
    pasted[:, :, rows, columns] = images.roll(-1, dims=0)[:, :, rows, columns]
    share = (box.bottom - box.top) * (box.right - box.left) / (images.shape[2] * images.shape[3])
    return pasted, (1.0 - share) * targets + share * targets.roll(-1, dims=0)


def _blend(values: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    import torch

    mixed = torch.zeros_like(values)
    for i in range(shares.shape[-1]):
        share = shares[..., i]
        column = share if share.ndim == 0 else share.reshape(-1, *[1] * (values.ndim - 1))
        mixed += column * values.roll(-i, dims=0)
    return mixed
