"""The timed cases: the layer against an MLP of as many rows and against peers; whole models.

Letters: B images, M tokens, D width, H hidden width, N experts, P slots per expert.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softmoe.bench.peers import available_peers
from softmoe.bench.roofline import Probes
from softmoe.bench.timing import Timing, interleave
from softmoe.bench.work import Work, mlp, soft_layer
from softmoe.budget import cost
from softmoe.models import create_model
from softmoe.models.transformer import MLP
from softmoe.moe import SoftMoE

M, D, H = 196, 384, 1536  # S/16 at 224 pixels


@dataclass(frozen=True)
class Row:
    case: str
    phase: str
    name: str
    timing: Timing
    roofline: float | None
    """Least possible time of its work on this machine, divided by the measured time."""
    peak_bytes: int | None = None
    """Most memory its process ever had, where it had one to itself."""


@dataclass(frozen=True)
class Contender:
    module: nn.Module
    x: Tensor
    work: Work | None


def bench_layer(probes: Probes, *, seconds: float = 15.0) -> Iterator[Row]:
    """S/16: 128 experts at batch 1, 8 and 32, and 32 experts with 4 slots at batch 32."""
    peers, _ = available_peers()
    for N, P, B in ((128, 1, 1), (128, 1, 8), (128, 1, 32), (32, 4, 32)):
        tokens = torch.randn(B, M, D)
        contenders = {
            "softmoe": Contender(SoftMoE(D, N, P, H), tokens, soft_layer(B, M, D, H, N, P)),
            "MLP, equal rows": Contender(MLP(D, H), torch.randn(B * N * P, D), mlp(B * N * P, D, H)),
        }
        for name, build in peers.items():
            contenders[name] = Contender(build(D, H, N, P), tokens, None)
        yield from compare(f"{N} experts x {P}, batch {B}", contenders, probes, train=True, seconds=seconds)


def bench_model(probes: Probes, *, seconds: float = 15.0) -> Iterator[Row]:
    """`soft_s16_128e` beside its dense backbone: forward, and at batch 8 a train step."""
    for B in (1, 8, 64):
        images = torch.randn(B, 3, 224, 224)
        contenders = {}
        for name in ("soft_s16_128e", "vit_s16"):
            price = cost(name)
            work = Work(B * price.macs, price.params, images.numel())
            contenders[name] = Contender(create_model(name), images, work)
        yield from compare(f"batch {B}", contenders, probes, train=B == 8, seconds=seconds)


def compare(
    case: str, contenders: dict[str, Contender], probes: Probes, *, train: bool, seconds: float
) -> Iterator[Row]:
    for phase in ("forward", "train") if train else ("forward",):
        make = forward_step if phase == "forward" else train_step
        functions = {name: make(c.module, c.x) for name, c in contenders.items()}
        timings = interleave(functions | probes.functions(), seconds=seconds)
        roofline = probes.roofline(timings)
        for name, contender in contenders.items():
            fraction = None
            if contender.work is not None:
                least = roofline.seconds(*getattr(contender.work, phase)())
                fraction = least / timings[name].median
            yield Row(case, phase, name, timings[name], fraction)


def forward_step(module: nn.Module, x: Tensor) -> Callable[[], object]:
    module.eval()

    def step() -> object:
        with torch.no_grad():
            return module(x)

    return step


def train_step(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward, backward and fused AdamW."""
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        module(x).square().mean().backward()
        optimizer.step()

    return step
