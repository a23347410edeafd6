"""Muon: an optimizer that steps along the momentum of a matrix with all its singular values made about 1."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from softmoe.accelerate.muon import Stack
from softmoe.machine import is_spread, local
from softmoe.parallel.reduce import local_shard, whole

QKV = re.compile(r"\.qkv\.weight$")  # query, key and value: three matrices in one
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
"""The coefficients of x, x^3 and x^5 by which Muon's authors bring small singular values up fastest."""
STEPS = 5
MOMENTUM = 0.95
BATCH = 1 << 22
"""Parameters whose step is computed together: small matrices cost more in calls than in arithmetic, and large ones
together would take memory."""


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of attention, MLPs and experts, AdamW for all other parameters.

    Muon steps along the momentum with all its singular values made about 1, so that no direction is left behind. The
    step has 0.2 sqrt(longer side) times that size, about that of an AdamW step: one learning rate serves both. Query,
    key and value, and each expert's matrix, are matrices of their own. A step costs about 50 D^3 operations for a
    matrix of D times 4 D, however few rows it saw: as much as training it on 2 D rows.
    Where a matrix is spread over processes each gathers the whole direction.
    """

    step_compiled: Callable[..., list[Stack]] | None = None
    """A step of many matrices at once, which returns those it does not take (softmoe/accelerate/muon.py)."""

    def __init__(self, groups: list[dict], betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": 0.0, "muon": False, "momentum": MOMENTUM, "betas": betas, "eps": eps})
        self.others = self.adamw_of_others()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # a copy, or a loaded state, has groups of its own
        for group in self.param_groups:
            group.setdefault("momentum", MOMENTUM)  # older states lack it
        self.others = self.adamw_of_others()

    def adamw_of_others(self) -> torch.optim.AdamW | None:
        """Make AdamW for the groups without Muon, with this optimizer's own groups and state."""
        others = [group for group in self.param_groups if not group["muon"]]
        adamw = torch.optim.AdamW(others, fused=True) if others else None
        if adamw is not None:
            adamw.state = self.state
        return adamw

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        skip = getattr(self, "found_inf", None)  # 1 on a GPU: leave everything as it is
        if self.others is not None:
            self.others.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
            self.others.step()
        stacks = self.stacks()
        if self.step_compiled is not None and skip is None:
            stacks = self.step_compiled(stacks, NEWTON_SCHULZ, STEPS)
        for batch in batches(stacks):
            momenta = [share * old + gradient for _, gradient, old, *_, share in batch]
            directions = [gradient + share * new for (_, gradient, *_, share), new in zip(batch, momenta, strict=True)]
            updates = own_updates(directions, [count for _, _, _, count, *_ in batch])
            for (weight, _, old, _, keep, rate, _), momentum, update in zip(batch, momenta, updates, strict=True):
                stepped = keep * local(weight) - rate * update
                for before, after in ((old, momentum), (weight, stepped)):
                    after = local(after) if skip is None else torch.where(skip.bool(), local(before), local(after))
                    local(before).copy_(after)

    def stacks(self) -> list[Stack]:
        """List what there is to step: parameters, as one or several matrices each, with gradient and momentum."""
        found = []
        for group in (group for group in self.param_groups if group["muon"]):
            keep = 1 - group["lr"] * group["weight_decay"]
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is None:
                    continue
                count = len(local(parameter)) if parameter.ndim == 3 else 3 if QKV.search(name) else 1
                rows = parameter.shape[1] if parameter.ndim == 3 else parameter.shape[0] // count
                rate = group["lr"] * 0.2 * math.sqrt(max(rows, parameter.shape[-1]))
                buffer = self.momentum(parameter)
                found.append((parameter, parameter.grad, buffer, count, keep, rate, group["momentum"]))
        return found

    def momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def batches(stacks: list[Stack]) -> Iterator[list[Stack]]:
    """Yield stacks together as long as their numbers are few."""
    batch, numbers = [], 0
    for stack in stacks:
        if batch and numbers + stack[0].numel() > BATCH:
            yield batch
            batch, numbers = [], 0
        batch.append(stack)
        numbers += stack[0].numel()
    if batch:
        yield batch


def own_updates(directions: list[Tensor], parts: list[int]) -> list[Tensor]:
    """Return this process's part of the orthogonalized directions; its own whole experts need nothing of the others."""
    own = [local(d) if has_whole_experts(d) else whole(d) for d in directions]
    updates = orthogonal_updates(own, parts)
    return [
        update if has_whole_experts(d) else local(local_shard(update, d))
        for update, d in zip(updates, directions, strict=True)
    ]


def has_whole_experts(direction: Tensor) -> bool:
    """Tell if a tensor is spread over processes so that each has some of the experts, whole."""
    return (
        is_spread(direction)
        and direction.ndim == 3
        and not any(p.is_shard(1) or p.is_shard(2) for p in direction.placements)
    )


def orthogonal_updates(directions: list[Tensor], parts: list[int]) -> list[Tensor]:
    """Return the directions with singular values near 1: experts, and so many parts of one matrix (its rows), apart.

    Matrices of one shape, and their transposes, are orthogonalized together.
    """
    stacks = [d if d.ndim == 3 else d.unflatten(0, (count, -1)) for d, count in zip(directions, parts, strict=True)]
    wide = [stack.mT if stack.shape[1] > stack.shape[2] else stack for stack in stacks]
    updates = list(directions)
    for kind in dict.fromkeys(map(kind_of, wide)):
        members = [i for i, stack in enumerate(wide) if kind_of(stack) == kind]
        found = orthogonalized(torch.cat([wide[i] for i in members]))
        for i, update in zip(members, found.split([len(wide[i]) for i in members]), strict=True):
            update = update if wide[i] is stacks[i] else update.mT
            updates[i] = update.reshape(directions[i].shape)
    return updates


def kind_of(stack: Tensor) -> tuple:
    return *stack.shape[1:], stack.dtype, stack.device


def orthogonalized(x: Tensor) -> Tensor:
    """Bring the singular values of matrices (..., rows, columns) near 1, by five steps of Newton and Schulz.

    A step is x <- q x with a polynomial q of x x^T. All five are products of the short sides' squares, and x is read
    twice: half of the arithmetic of doing them one by one on the long side.
    """
    if x.shape[-2] > x.shape[-1]:
        return orthogonalized(x.mT).mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    gram = x @ x.mT
    steps = step = newton_schulz(gram)
    for _ in range(STEPS - 1):
        gram = step @ gram @ step
        step = newton_schulz(gram)
        steps = step @ steps
    return steps @ x


def newton_schulz(gram: Tensor) -> Tensor:
    """Return the matrix q of one step x <- q x, from x x^T."""
    a, b, c = NEWTON_SCHULZ
    step = b * gram + c * gram @ gram
    step.diagonal(dim1=-2, dim2=-1).add_(a)
    return step
