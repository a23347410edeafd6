"""Mixup as the reference does it: each image is blended with the ones that follow it in the batch."""

from __future__ import annotations

import numpy as np
import torch


def mixup_weights(concentration: float, rng: np.random.Generator, size: int = 2) -> np.ndarray:
    """(size,) float32 from a symmetric Dirichlet distribution, largest first: an image stays itself."""
    return np.sort(rng.dirichlet(np.full(size, concentration)))[::-1].astype(np.float32)


def mixup(
    images: torch.Tensor, targets: torch.Tensor, weights: np.ndarray | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_i w_i * roll(x, -i) over the batch axis, of images (B, ...) and targets (B, C) alike.

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


def _blend(values: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    mixed = torch.zeros_like(values)
    for i in range(shares.shape[-1]):
        share = shares[..., i]
        column = share if share.ndim == 0 else share.reshape(-1, *[1] * (values.ndim - 1))
        mixed += column * values.roll(-i, dims=0)
    return mixed
