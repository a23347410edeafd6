"""Training images blended with those that follow them in the batch, and their labels alike: mixup and cutmix."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Rectangle:
    """Rows from top up to bottom, columns from left up to right."""

    top: int
    bottom: int
    left: int
    right: int


def soft_labels(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """(B, C) float32 from (B,) class numbers; what is float already is returned as it is."""
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
    """Draw what cutmix pastes: the share of the area that a symmetric beta distribution gives, anywhere, cut at the
    border, as in the paper of CutMix."""
    height, width = size
    side = np.sqrt(rng.beta(concentration, concentration))
    row, column = rng.integers(height), rng.integers(width)
    top, bottom = (int(np.clip(row + sign * height * side / 2, 0, height)) for sign in (-1, 1))
    left, right = (int(np.clip(column + sign * width * side / 2, 0, width)) for sign in (-1, 1))
    return Rectangle(top, bottom, left, right)


def cutmix(images: torch.Tensor, targets: torch.Tensor, box: Rectangle) -> tuple[torch.Tensor, torch.Tensor]:
    """Paste a rectangle of the image that follows in the batch into each (B, 3, H, W); targets (B, C) are blended by
    the area."""
    rows, columns = slice(box.top, box.bottom), slice(box.left, box.right)
    pasted = images.clone()
    pasted[:, :, rows, columns] = images.roll(-1, dims=0)[:, :, rows, columns]
    share = (box.bottom - box.top) * (box.right - box.left) / (images.shape[2] * images.shape[3])
    return pasted, (1.0 - share) * targets + share * targets.roll(-1, dims=0)


def _blend(values: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    mixed = torch.zeros_like(values)
    for i in range(shares.shape[-1]):
        share = shares[..., i]
        column = share if share.ndim == 0 else share.reshape(-1, *[1] * (values.ndim - 1))
        mixed += column * values.roll(-i, dims=0)
    return mixed
