"""Gather the rows of all ranks on every rank, for losses that compare each example with all others."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd, wait_tensor


def gather_rows(rows: Tensor) -> Tensor:
    """Gather (B, ...) on each of W ranks -> (W * B, ...), in the order of the ranks; B must be the same on all.

    Its gradient is added up over the ranks: where every rank takes the mean loss of its own rows, and gradients of
    weights are averaged over the ranks, they are those of the mean over the whole batch.
    """
    if ranks() == 1:
        return rows
    assert dist.group.WORLD is not None
    return wait_tensor(all_gather_tensor_autograd(rows.contiguous(), 0, dist.group.WORLD))


def first_row(rows: Tensor) -> int:
    """Return where this rank's rows begin among those of all."""
    return dist.get_rank() * rows.shape[0] if ranks() > 1 else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
