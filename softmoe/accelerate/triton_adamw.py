"""AdamW with moments in bfloat16 by a Triton kernel on CUDA devices: one pass over memory, and no wait.

The kernel is in kernels/adamw.py. Its rounding takes its random numbers from the table of the CPU's update, by step,
parameter and place, so a resumed run rounds the same.
"""

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from softmoe.accelerate import fastest
from softmoe.accelerate.guards import Off

if TYPE_CHECKING:  # without that technique there is no such optimizer, and nothing here is called
    from softmoe.accelerate.optimizer import Flat

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
"""The settings of the first step in which kernel and torch are compared."""
Rows = list[tuple["Flat", Tensor]]


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if not hasattr(optimizer, "by_kernel"):
        raise Off("no optimizer with moments in bfloat16")
    fastest.need_triton(model)
    optimizer.by_kernel = by_kernel  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
    return "moments in bfloat16, where it is faster"


def by_kernel(rows: Rows, indices: list[int], group: dict[str, Any], skip: Tensor | None) -> bool:
    """Update all rows if the kernel is faster for the largest of them; False if nothing was done.

    Where `skip` is 1 nothing changes. `indices` are the parameters' numbers, which the rounding depends on. Kernel and
    torch are compared on no more than GPU_PIECE numbers: copies of all experts of a layer may be gigabytes.
    """
    from softmoe.accelerate.optimizer import GPU_PIECE, update_together

    if not all(fastest.may_use(*flat) and flat.gradient.is_contiguous() for flat, _ in rows):
        return False
    largest = max((flat for flat, _ in rows), key=lambda flat: flat.weight.numel())
    plain, kernel = (partial(first_step, way) for way in (partial(_ignore_indices, update_together), update_each))
    if not fastest.kernel_is_faster("AdamW", plain, kernel, *(part[:GPU_PIECE] for part in largest)):
        return False
    update_each(rows, indices, group, skip)
    return True


def update_each(rows: Rows, indices: list[int], group: dict[str, Any], skip: Tensor | None) -> None:
    from softmoe.accelerate.kernels import adamw
    from softmoe.accelerate.optimizer import SHIFTS

    steps = [step for _, step in rows]
    torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
    for index, (flat, step) in zip(indices, rows, strict=True):
        noise = noise_on(flat.weight.device)
        adamw.update(*flat, step, skip, noise, index, len(noise) - SHIFTS, SHIFTS, group)
    if skip is not None:
        torch._foreach_sub_(steps, [skip] * len(steps))  # pyright: ignore[reportPrivateImportUsage]


@cache
def noise_on(device: torch.device) -> Tensor:
    from softmoe.accelerate.optimizer import Workspace

    return Workspace(device).numbers


def _ignore_indices(way: Any, rows: Rows, indices: list[int], group: dict[str, Any], skip: Tensor | None) -> None:
    way(rows, group, skip)


def first_step_exactly(weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight and its moments after the first step of AdamW from moments of zero, whose corrections cancel."""
    (beta1, beta2), rate = SETTINGS["betas"], SETTINGS["lr"]
    kept = weight * (1 - rate * SETTINGS["weight_decay"])
    step = rate * gradient / (gradient.abs() + SETTINGS["eps"])
    return kept - step, (1 - beta1) * gradient, (1 - beta2) * gradient.square()


def first_step(way: Any, *tensors: Tensor) -> Tensor:
    """Take a first step on copies of weight, gradient and both moments; return weight and moments in one tensor."""
    from softmoe.accelerate.optimizer import Flat

    flat = Flat(*(tensor.detach().clone() for tensor in tensors))
    way([(flat, torch.zeros((), device=flat.weight.device))], [1], SETTINGS, None)
    return torch.cat([flat.weight.float(), flat.first.float(), flat.second.float()])
