"""AdamW that keeps its two moments in bfloat16: half of their memory, and so three quarters of a training's.

The update is computed in float32: by torch's fused one on pieces that stay in the cache, or, once it is switched on, on
a CPU by optimizer.cpp in one pass over memory. The moments are rounded only when they are stored between steps: the
first to the nearest number, the second stochastically, up or down so that its mean is right. With a beta2 of 0.999 a
step changes the second moment by less than half a unit of bfloat16's last place: rounded to the nearest it would never
change, and neither would the step size.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softmoe.accelerate.build import Kernel, call
from softmoe.accelerate.guards import Off
from softmoe.machine import local

PIECE = 1 << 20  # numbers updated at a time on a CPU, where they stay in the cache
GPU_PIECE = 1 << 24  # and on a GPU, where calls cost more than memory
SHIFTS = 1 << 12  # places in the table of random numbers at which a piece may begin
_CUT = -(1 << 16)  # a mask of the bits of a float32 that bfloat16 has


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if not isinstance(optimizer, CompactAdamW):
        raise Off("no optimizer with moments in bfloat16")
    if why := KERNEL.why_not():
        raise Off(why)
    if any(p.device.type != "cpu" for group in optimizer.param_groups for p in group["params"]):
        raise Off("not on a CPU")
    optimizer.in_one_pass = True
    return "moments in bfloat16"


class Flat(NamedTuple):
    """A parameter, its gradient and its two moments, each flattened to one axis."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor


class CompactAdamW(torch.optim.Optimizer):
    """An AdamW like torch's, with state of the same names (`step`, `exp_avg`, `exp_avg_sq`), the last two in bfloat16.

    The random numbers of the rounding are a function of the step and the place, so a resumed run draws the same.
    """

    state_dtype = torch.bfloat16
    """The moments of a checkpoint must have this dtype."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.in_one_pass = False
        """Whether the compiled update is used."""
        self.by_kernel: Callable[[list[tuple[Flat, Tensor]], list[int], dict[str, Any], Any], bool] | None = None
        """An update of many parameters on a GPU that may decline (see triton_adamw.py)."""
        self._workspaces: dict[torch.device, Workspace] = {}

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        self.update(gradients, torch.get_num_threads())

    @torch.no_grad()
    def update(self, gradients: Mapping[Tensor, Tensor], threads: int) -> None:
        """Update these parameters alone. No `grad` is read, so that others may get theirs meanwhile."""
        index = 0
        for group in self.param_groups:
            rows: list[tuple[Flat, Tensor]] = []
            indices: list[int] = []
            for parameter in group["params"]:
                index += 1
                if parameter not in gradients:
                    continue
                flat, step = self._rows(parameter, gradients[parameter])
                if flat.weight.device.type == "cpu":
                    step += 1
                    self._update(flat, step, index, group, threads)
                else:
                    rows.append((flat, step))
                    indices.append(index)
            skip = getattr(self, "found_inf", None)
            if rows and not (self.by_kernel is not None and self.by_kernel(rows, indices, group, skip)):
                update_together(rows, group, skip)

    def _rows(self, parameter: Tensor, gradient: Tensor) -> tuple[Flat, Tensor]:
        """Return what this process keeps of a parameter and its state, flat, and the count of its updates."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        weight, first, second = (local(t).view(-1) for t in (parameter, state["exp_avg"], state["exp_avg_sq"]))
        return Flat(weight, local(gradient).reshape(-1), first, second), state["step"]

    def _update(self, flat: Flat, step: Tensor, index: int, group: dict[str, Any], threads: int) -> None:
        device = flat.weight.device
        space = self._workspaces.get(device) or self._workspaces.setdefault(device, Workspace(device))
        if self.in_one_pass and flat.weight.dtype == flat.gradient.dtype == torch.float32:
            in_one_pass(KERNEL.library, flat, space.numbers, (int(step), index), group, threads)
        else:
            in_pieces(flat, space, step, index, group)


def update_together(rows: list[tuple[Flat, Tensor]], group: dict[str, Any], skip: Tensor | None) -> None:
    """Update many parameters on a GPU by few calls, none of which waits: GPU_PIECE numbers at a time in float32.

    The random numbers of the rounding are the device's own, which a run seeds at every step. Where `skip` is 1 nothing
    changes, also by rounding: the bits that are cut off are zero in a moment that was read from bfloat16.
    """
    steps = [step for _, step in rows]
    torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
    for parts in _portions(rows):
        weights, gradients, firsts, seconds = (
            list(column) for column in zip(*(flat for flat, _ in parts), strict=True)
        )
        sizes = [weight.numel() for weight in weights]
        m, v = torch.empty(2, sum(sizes), device=weights[0].device)
        ms, vs = list(m.split(sizes)), list(v.split(sizes))
        torch._foreach_copy_(ms, firsts)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_copy_(vs, seconds)  # pyright: ignore[reportPrivateImportUsage]
        fused_update(weights, gradients, ms, vs, [step for _, step in parts], group, skip)
        round_at_random(v, torch.randint(0, -_CUT, v.shape, dtype=torch.int32, device=v.device))
        torch._foreach_copy_(firsts, ms)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_copy_(seconds, vs)  # pyright: ignore[reportPrivateImportUsage]
    if skip is not None:
        torch._foreach_sub_(steps, [skip] * len(steps))  # pyright: ignore[reportPrivateImportUsage]


def _portions(rows: list[tuple[Flat, Tensor]]) -> Iterator[list[tuple[Flat, Tensor]]]:
    """Cut and gather rows so that GPU_PIECE numbers are in each portion."""
    portion: list[tuple[Flat, Tensor]] = []
    left = GPU_PIECE
    for flat, step in rows:
        start, count = 0, flat.weight.numel()
        while start < count:
            stop = min(count, start + left)
            portion.append((Flat(*(tensor[start:stop] for tensor in flat)), step))
            start, left = stop, left - (stop - start)
            if not left:
                yield portion
                portion, left = [], GPU_PIECE
    if portion:
        yield portion


def in_pieces(flat: Flat, space: Workspace, step: Tensor, index: int, group: dict[str, Any]) -> None:
    for place, start in enumerate(range(0, flat.weight.numel(), PIECE)):
        weight, gradient, first, second = (tensor[start : start + PIECE] for tensor in flat)
        m, v = space.first[: weight.numel()], space.second[: weight.numel()]
        m.copy_(first)
        v.copy_(second)
        fused_update([weight], [gradient], [m], [v], [step], group)
        first.copy_(m)
        round_at_random(v, space.noise(v.numel(), (int(step), index, place)))
        second.copy_(v)


def self_test(library: ctypes.CDLL) -> bool:
    """Take a first step from a weight of 1 with a gradient of 2: both moments are exact, the step is the rate."""
    flat = Flat(torch.ones(40), torch.full((40,), 2.0), *torch.zeros(2, 40, dtype=torch.bfloat16))
    group = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.0, "weight_decay": 0.0}
    in_one_pass(library, flat, torch.zeros(40 + SHIFTS, dtype=torch.int32), (1, 1), group, 1)
    return bool((flat.weight == 0.75).all() and (flat.first == 1).all() and (flat.second == 1).all())


def in_one_pass(
    library: ctypes.CDLL, flat: Flat, noise: Tensor, seed: tuple[int, int], group: dict[str, Any], threads: int
) -> None:
    """Update one parameter in one pass; `seed` is the number of the step and that of the parameter."""
    beta1, beta2 = group["betas"]
    step, rate = seed[0], group["lr"]
    assert all(tensor.is_contiguous() for tensor in (*flat, noise))
    settings = (
        1 - rate * group["weight_decay"],
        beta1,
        beta2,
        rate / (1 - beta1**step),
        1 / math.sqrt(1 - beta2**step),
        group["eps"],
    )
    sizes = (flat.weight.numel(), len(noise) - SHIFTS, SHIFTS)
    call(library.adamw, *flat, noise, *sizes, *seed, *map(float, settings), threads=threads)


def fused_update(
    weights: list[Tensor],
    gradients: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
    skip: Tensor | None = None,
) -> None:
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        weights,
        gradients,
        ms,
        vs,
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )


class Workspace:
    """Holds float32 memory for the moments of one piece, and a table of random numbers for the rounding."""

    def __init__(self, device: torch.device):
        self.first, self.second = torch.empty(PIECE, device=device), torch.empty(PIECE, device=device)
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint(0, -_CUT, (PIECE + SHIFTS,), dtype=torch.int32, generator=generator)
        self.numbers = numbers.to(device)

    def noise(self, count: int, seed: tuple[int, int, int]) -> Tensor:
        shift = sum(a * b for a, b in zip(seed, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D), strict=True)) // 64 % SHIFTS
        return self.numbers[shift : shift + count]


def round_at_random(values: Tensor, noise: Tensor) -> None:
    """Round float32 values in place to numbers that bfloat16 has, up with the probability of the part that is cut off.

    `noise` is int32, uniform over the 16 bits that are cut.
    """
    values.view(torch.int32).add_(noise).bitwise_and_(_CUT)


KERNEL = Kernel("optimizer", self_test)
