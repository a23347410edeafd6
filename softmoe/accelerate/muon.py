"""The step of Muon by muon.cpp, on a CPU: each matrix in one pass over memory, and its symmetric products by half.

The case: the recipe `small_data`, where the matrices of 64 experts, stepped by torch, take a quarter of the time of a
step. Each matrix is computed by one thread, so the numbers do not depend on how many there are.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.accelerate.build import Kernel, call
from softmoe.accelerate.guards import Off, plain_float32

Stack = tuple[Tensor, Tensor, Tensor, int, float, float, float]
"""Weight, gradient, momentum; how many matrices they are; 1 - rate * decay; rate times the factor of their size; the
share of the momentum that is kept."""


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if not hasattr(optimizer, "step_compiled"):
        raise Off("the optimizer is not Muon")
    if why := KERNEL.why_not():
        raise Off(why)
    keeper: Any = optimizer
    if any(p.device.type != "cpu" for group in keeper.param_groups for p in group["params"]):
        raise Off("not on a CPU")
    keeper.step_compiled = step
    return f"{sum(len(group['params']) for group in keeper.param_groups if group['muon'])} parameters"


def step(stacks: Sequence[Stack], coefficients: tuple[float, float, float], steps: int) -> list[Stack]:
    """Step all float32 matrices in place and return the other stacks, which are left as they are.

    The polynomial of Newton and Schulz is used `steps` times.
    """
    matrices = [matrix for stack in stacks if is_supported(stack) for matrix in unstacked(stack)]
    if len(matrices) < torch.get_num_threads():  # torch shares one product among threads
        return list(stacks)
    launch(KERNEL.library, matrices, coefficients, steps)
    return [stack for stack in stacks if not is_supported(stack)]


def is_supported(stack: Stack) -> bool:
    return plain_float32(*stack[:3]) and all(t.is_contiguous() for t in stack[:3])


def unstacked(stack: Stack) -> list[tuple[list[int], tuple[int, int], list[float]]]:
    """Return addresses, sizes and factors of each matrix of a stack, whose first axis, or rows, it is cut along."""
    weight, gradient, momentum, count, *factors = stack
    columns = weight.shape[-1]
    rows = weight.numel() // (count * columns)
    far = 4 * rows * columns
    addresses = [t.data_ptr() for t in (weight, gradient, momentum)]
    return [([at + i * far for at in addresses], (rows, columns), factors) for i in range(count)]


def launch(library: ctypes.CDLL, matrices: list, coefficients: tuple[float, ...], steps: int) -> None:
    addresses, sizes, factors = zip(*matrices, strict=True)
    kinds = ((addresses, torch.int64), (sizes, torch.int64), (factors, torch.float32))
    tables = [torch.tensor(column, dtype=dtype) for column, dtype in kinds]
    call(library.muon_step, *tables, len(matrices), *coefficients, steps)


def self_test(library: ctypes.CDLL) -> bool:
    """Compare wide, tall and square matrices with the same polynomial of their singular values."""
    coefficients, share, keep, rate = (3.0, -4.0, 2.0), 0.5, 0.75, 0.25
    for rows, columns in ((5, 37), (37, 5), (18, 18)):
        weight, gradient, momentum = (
            torch.arange(2 * rows * columns).remainder(number).view(2, rows, columns) - number / 2.0
            for number in (13, 11, 7)
        )
        direction = (1 + share) * gradient.double() + share**2 * momentum.double()
        norm = direction.flatten(1).norm(dim=1)[:, None, None]
        u, s, v = torch.linalg.svd(direction / norm, full_matrices=False)
        for _ in range(3):
            s = coefficients[0] * s + coefficients[1] * s**3 + coefficients[2] * s**5
        expected = keep * weight.double() - rate * u @ torch.diag_embed(s) @ v
        stack = weight, gradient, momentum, 2, keep, rate, share
        launch(library, unstacked(stack), coefficients, 3)
        if (weight - expected).abs().max() > 1e-4:
            return False
    return True


KERNEL = Kernel("muon", self_test)
