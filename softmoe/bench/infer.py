"""Inference: the model as trained beside the prepared one, for every way of storing experts.

A row's roofline counts the weights in the bytes they are stored in: int8 must be four times as fast as float32 to
have the same share. Each name says how far the outputs are from the plain model's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softmoe.bench.cases import Contender, D, H, M, Row, compare
from softmoe.bench.roofline import Probes
from softmoe.bench.work import WORD, Work, soft_layer
from softmoe.budget import cost
from softmoe.inference import WEIGHTS, Weights, kernel, prepare
from softmoe.models import create_model
from softmoe.moe import SoftMoE


@dataclass(frozen=True)
class StoredWork(Work):
    """Weights that are read as they are stored."""

    stored: float = 0.0
    """Bytes of all weights."""

    def forward(self) -> tuple[float, float]:
        return 2 * self.macs, self.stored + WORD * self.in_out


def bench_infer(probes: Probes, *, seconds: float = 15.0, batches: Sequence[int] = (1, 8, 32)) -> Iterator[Row]:
    """One S/16 layer of 128 experts; a small model; and S/16 128E whole, where memory for three of it is needed."""
    layer = SoftMoE(D, 128, 1, H).eval()
    tokens = {B: torch.randn(B, M, D) for B in batches}
    works = {B: soft_layer(B, M, D, H, 128, 1) for B in batches}
    yield from cases("S/16 layer, 128 experts", layer, tokens, works, WEIGHTS, probes, seconds)
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
        yield from cases(name, model, images, works, stored, probes, seconds)


def cases(
    name: str,
    plain: nn.Module,
    inputs: dict[int, Tensor],
    works: dict[int, Work],
    stored: Sequence[Weights],
    probes: Probes,
    seconds: float,
) -> Iterator[Row]:
    possible: list[Weights] = [weights for weights in stored if weights != "int8_dynamic" or kernel.has_bytes()]
    modules = {"plain float32": plain} | {weights: prepare(plain, weights) for weights in possible}
    how = "" if kernel.available() else " (no compiler)"
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
