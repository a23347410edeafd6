"""AdamW with moments in bfloat16 by a Triton kernel on CUDA devices: one pass, and no wait for the number of the step.

The kernel is in kernels/adamw.py; it rounds with the same random numbers as the other ways of the same optimizer.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from softmoe.accelerate import fastest
from softmoe.accelerate.guards import Off

if TYPE_CHECKING:  # without that technique there is no such optimizer, and nothing here is called
    from softmoe.accelerate.optimizer import Flat, Room


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if not hasattr(optimizer, "by_kernel"):
        raise Off("no optimizer with moments in bfloat16")
    fastest.need_triton(model)
    optimizer.by_kernel = by_kernel  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
    return "moments in bfloat16, for the sizes where it is faster"


def by_kernel(flat: "Flat", room: "Room", step: Tensor, index: int, group: dict[str, Any]) -> bool:
    """Do the step if the kernel is the faster way for this size; False if nothing was done."""
    from softmoe.accelerate.optimizer import in_pieces

    if not fastest.may_use(*flat):
        return False
    plain, kernel = (partial(_on_copies, way, room) for way in (in_pieces, update))
    if not fastest.faster("AdamW", plain, kernel, *flat):
        return False
    update(flat, room, step, index, group)
    return True


def update(flat: "Flat", room: "Room", step: Tensor, index: int, group: dict[str, Any]) -> None:
    from softmoe.accelerate.kernels import adamw
    from softmoe.accelerate.optimizer import SHIFTS

    assert all(tensor.is_contiguous() for tensor in flat)
    adamw.update(*flat, step, room.numbers, index, len(room.numbers) - SHIFTS, SHIFTS, group)


def _on_copies(way: Any, room: "Room", *tensors: Tensor) -> Tensor:
    """A first step on copies, which both ways make; returns all that a step changes."""
    from softmoe.accelerate.optimizer import Flat

    flat = Flat(*(tensor.detach().clone() for tensor in tensors))
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    way(flat, room, torch.ones((), device=flat.weight.device), 1, settings)
    return torch.cat([flat.weight.float(), flat.first.float(), flat.second.float()])
