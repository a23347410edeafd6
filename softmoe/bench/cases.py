"""Compare functions in turn: how a step is made and becomes a row, and the suites of whole and of prepared models.

A prepared model's roofline counts the weights in the bytes they are stored in: int8 must be four times as fast as
float32 to have the same share. Each of its names says how far the outputs are from the plain model's.

Letters: B images, M tokens, D width, H hidden width, N experts, P slots per expert.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softmoe.bench.timing import WORD, Probes, Timing, Work, interleave, soft_layer
from softmoe.budget import cost
from softmoe.inference import WEIGHTS, Weights, kernel, prepare
from softmoe.models import create_model
from softmoe.moe import SoftMoE

M, D, H = 196, 384, 1536  # S/16 at 224 pixels


@dataclass(frozen=True)
class Row:
    """One timing: which case, which phase (forward, train, image), and whose."""

    case: str
    phase: str
    name: str
    timing: Timing
    roofline: float | None
    """Least possible time of the work on this machine, divided by the measured time."""
    peak_bytes: int | None = None
    """The most memory the process ever had, where the row had one to itself."""


@dataclass(frozen=True)
class Contender:
    """A module, its input, and the least work that its roofline counts (None: no roofline)."""

    module: nn.Module
    x: Tensor
    work: Work | None


def bench_model(probes: Probes, *, seconds: float = 15.0) -> Iterator[Row]:
    """Time `soft_s16_128e` beside its dense backbone: forward, and at batch 8 a train step."""
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
    """Time all contenders in turn with the roofline's probes: a forward pass without gradients, then a train step."""
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
    """Return a function that does a forward pass in evaluation mode, without gradients."""
    module.eval()

    def step() -> object:
        with torch.no_grad():
            return module(x)

    return step


def train_step(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a function that does forward, backward and fused AdamW."""
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        module(x).square().mean().backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class StoredWork(Work):
    """A forward pass that reads its weights in the bytes they are stored in."""

    stored: float = 0.0
    """Bytes of all weights."""

    def forward(self) -> tuple[float, float]:
        return 2 * self.macs, self.stored + WORD * self.in_out


def bench_infer(probes: Probes, *, seconds: float = 15.0, batches: Sequence[int] = (1, 8, 32)) -> Iterator[Row]:
    """Time one S/16 layer of 128 experts, a small model, and S/16 128E whole (memory for three of it is needed)."""
    layer = SoftMoE(D, 128, 1, H).eval()
    tokens = {B: torch.randn(B, M, D) for B in batches}
    works = {B: soft_layer(B, M, D, H, 128, 1) for B in batches}
    yield from compare_prepared("S/16 layer, 128 experts", layer, tokens, works, WEIGHTS, probes, seconds)
    models: dict[str, Sequence[Weights]] = {
        "soft_ti16_16e": WEIGHTS,
        "soft_s16_128e": ("float32", "int8", "int8_dynamic"),
    }
    for name, stored in models.items():
        model = create_model(name).eval()
        torch.nn.init.normal_(model.head.weight)  # pyright: ignore[reportArgumentType]  # zero at first: all outputs equal
        price = cost(name)
        images = {B: torch.randn(B, 3, 224, 224) for B in batches}
        works = {B: Work(B * price.macs, price.params, images[B].numel()) for B in batches}
        yield from compare_prepared(name, model, images, works, stored, probes, seconds)


def compare_prepared(
    name: str,
    plain: nn.Module,
    inputs: dict[int, Tensor],
    works: dict[int, Work],
    stored: Sequence[Weights],
    probes: Probes,
    seconds: float,
) -> Iterator[Row]:
    """Time a plain module beside its prepared forms, batch by batch."""
    possible: list[Weights] = [weights for weights in stored if weights != "int8_dynamic" or kernel.has_bytes()]
    modules = {"plain float32": plain} | {weights: prepare(plain, weights) for weights in possible}
    how = "" if kernel.KERNEL.available else " (no compiler)"
    for B, x in inputs.items():
        contenders = {}
        with torch.no_grad():
            right = plain(x)
            for kind, module in modules.items():
                difference = float((module(x) - right).norm() / right.norm())
                work = StoredWork(works[B].macs, works[B].params, works[B].in_out, stored_bytes(module))
                label = kind if module is plain else f"{kind}{how}, off {difference:.0e}"
                contenders[label] = Contender(module, x, work)
        yield from compare(f"{name}, batch {B}", contenders, probes, train=False, seconds=seconds)


def stored_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
