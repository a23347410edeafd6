"""AdamW that keeps its two moments in bfloat16: half of their memory, and so three quarters of a training's.

The update itself is torch's fused one, in float32, on pieces that stay in the cache. Of the moments only what is kept
between steps is rounded: the first to the nearest number, the second at random, up or down so that its mean is right.
With a beta2 of 0.999 a step changes the second moment by less than half a unit of bfloat16's last place: rounded to the
nearest it would stay where it is for ever, and the step size with it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from softmoe.parallel import local

PIECE = 1 << 20  # numbers updated at a time
_SHIFTS = 1 << 12
_CUT = -(1 << 16)  # the bits of a float32 that bfloat16 has


class CompactAdamW(torch.optim.Optimizer):
    """As torch.optim.AdamW; state `step`, `exp_avg` and `exp_avg_sq` by the same names, the last two in bfloat16.

    The random numbers of the rounding are a function of the step and the place, so a resumed run draws the same.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._room: dict[torch.device, _Room] = {}

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._update(parameter, index, group)

    def _update(self, parameter: Tensor, index: int, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        assert parameter.grad is not None
        weight, first, second = (local(t).view(-1) for t in (parameter, state["exp_avg"], state["exp_avg_sq"]))
        gradient = local(parameter.grad).reshape(-1)
        room = self._room.get(weight.device) or self._room.setdefault(weight.device, _Room(weight.device))
        count = int(state["step"])
        for place, start in enumerate(range(0, weight.numel(), PIECE)):
            part = slice(start, start + PIECE)
            m, v = room.first[: weight[part].numel()], room.second[: weight[part].numel()]
            m.copy_(first[part])
            v.copy_(second[part])
            fused_update(weight[part], gradient[part], m, v, state["step"], group)
            first[part] = m
            round_at_random(v, room.noise(v.numel(), (count, index, place)))
            second[part] = v


def fused_update(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: Tensor, group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [weight],
        [gradient],
        [m],
        [v],
        [],
        [step],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


class _Room:
    """Where a piece is worked on, and random numbers to take from."""

    def __init__(self, device: torch.device):
        self.first, self.second = torch.empty(PIECE, device=device), torch.empty(PIECE, device=device)
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint(0, -_CUT, (PIECE + _SHIFTS,), dtype=torch.int32, generator=generator)
        self.numbers = numbers.to(device)

    def noise(self, count: int, seed: tuple[int, int, int]) -> Tensor:
        shift = sum(a * b for a, b in zip(seed, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D), strict=True)) // 64 % _SHIFTS
        return self.numbers[shift : shift + count]


def round_at_random(values: Tensor, noise: Tensor) -> None:
    """Round float32 values in place to numbers that bfloat16 has: up with the probability of the part that is cut off.

    `noise` is int32, uniform over the 16 bits that are cut.
    """
    values.view(torch.int32).add_(noise).bitwise_and_(_CUT)
