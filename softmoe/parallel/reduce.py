"""Bring the ranks' numbers together: the true norm of a sharded gradient, means over ranks, the rows of all ranks."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from softmoe.accelerate.torch_private import multiply_all_
from softmoe.machine import is_spread, local


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor with the parts of all ranks, which must all call this; a plain tensor itself."""
    return tensor.full_tensor() if is_spread(tensor) else tensor


def local_shard(tensor: Tensor, model: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that all ranks have whole, cut as `model` is; all of it if that is plain."""
    if not is_spread(model):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(model.device)  # all ranks have it, so none sends it
    return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)


def copies(tensor: Tensor) -> int:
    """Count the ranks that keep the same part of a tensor."""
    parts = 1
    if is_spread(tensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            parts *= size if placement.is_shard() else 1
    return ranks() // parts


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all tensors together, each element counted once, wherever it is. The same on every rank."""
    by_copies: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_copies.setdefault(copies(tensor), []).append(local(tensor))
    if not by_copies:
        return torch.zeros(())
    squares = [torch.nn.utils.get_total_norm(parts).square() / count for count, parts in by_copies.items()]
    return sum_over_ranks(torch.stack(squares).sum()).sqrt()


def clip_by_global_norm(
    gradients: Iterable[Tensor], max_norm: float | None, norm: Callable[[list[Tensor]], Tensor] = global_norm
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`, with no epsilon; returns the norm before."""
    gradients = list(gradients)
    found = norm(gradients)
    if max_norm is not None and (found.device.type != "cpu" or found > max_norm):  # a GPU would be waited for
        parts = [local(gradient) for gradient in gradients]
        multiply_all_(parts, (max_norm / found).clamp(max=1.0))
    return found


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum as a new tensor, the same on every rank; `values` itself where there is one process."""
    if ranks() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def mean_over_ranks(values: Tensor) -> Tensor:
    return sum_over_ranks(values) / ranks()


def gather_rows(rows: Tensor) -> Tensor:
    """Gather (B, ...) on each of W ranks -> (W * B, ...), in the order of the ranks; B must be the same on all.

    Its gradient is added up over the ranks: where every rank takes the mean loss of its own rows, and gradients of
    weights are averaged over the ranks, they are those of the mean over the whole batch.
    """
    if ranks() == 1:
        return rows
    from torch.distributed.nn.functional import all_gather  # slow to import

    return torch.cat(all_gather(rows))


def gather_uneven(rows: Tensor) -> Tensor:
    """Gather (B, ...), where B is another on each rank and may be 0, into the rows of all ranks. It has no gradient."""
    if ranks() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks())]
    dist.all_gather(counts, torch.tensor([len(rows)]))
    most = max(int(count) for count in counts)
    padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def first_row(rows: Tensor) -> int:
    """Return the index of this rank's first row among the rows of all ranks."""
    return dist.get_rank() * rows.shape[0] if ranks() > 1 else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
