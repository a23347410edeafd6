"""Compare modules: how a step is made, timed and becomes a row, and the suites of models, routers and inference.

The roofline of a prepared model counts the weights in the bytes they are stored in: int8 must be four times as fast as
float32 to have the same share. The names of prepared models say how far their outputs are from the plain model's.

Letters: B images, M tokens, D width, H hidden width, N experts, P slots per expert, C slots per expert and image,
T = B*M tokens, S rows per expert.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softmoe import accelerate
from softmoe.bench.timing import WORD, Probes, Timing, Work, allocated_by, interleave, on_cuda, soft_layer, sparse_layer
from softmoe.budget import cost
from softmoe.inference import WEIGHTS, Weights, prepare
from softmoe.inference.layers import KERNEL, has_bytes
from softmoe.models import create_model
from softmoe.moe import Experts, ExpertsChoiceRouter, MoE, Router, Routing, SoftMoE, SoftRouter, TokensChoiceRouter
from softmoe.moe.routing import SparseRouting

M, D, H = 196, 384, 1536  # S/16 at 224 pixels
LONG, NARROW = 4096, 128  # tokens and width of `bench_scaling`; its 4,096 experts take 2.1 GB
COUNTS = (8, 32, 128, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Row:
    """The timing of one contender in one case and phase (forward, train, image)."""

    case: str
    phase: str
    name: str
    timing: Timing
    roofline: float | None
    """Least possible time of the work on this machine, divided by the measured time."""
    peak_bytes: int | None = None
    """The peak memory of the process, if the row had a process to itself; on CUDA that of the weights and a call."""


@dataclass(frozen=True)
class Contender:
    """A module to time with its input, and the work of its roofline (None: no roofline)."""

    module: nn.Module
    x: Tensor
    work: Work | None
    accelerated: bool = False
    """Whether softmoe.accelerate is put on the module and, in a train step, on its optimizer."""


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
    """Time all contenders in turn with the probes of the roofline: a forward pass, then a train step if asked for."""
    for phase in ("forward", "train") if train else ("forward",):
        make = forward_step if phase == "forward" else train_step
        functions = {name: make(c) for name, c in contenders.items()}
        timings = interleave(functions | probes.functions(), seconds=seconds)
        roofline = probes.roofline(timings)
        for name, contender in contenders.items():
            work = contender.work and getattr(contender.work, phase)()
            share = None if work is None else roofline.seconds(*work) / timings[name].median
            memory = stored_bytes(contender.module) + allocated_by(functions[name]) if on_cuda() else None
            yield Row(case, phase, name, timings[name], share, memory)


def forward_step(contender: Contender) -> Callable[[], object]:
    """Return a function that does a forward pass in evaluation mode, without gradients."""
    module, x = contender.module.eval(), contender.x
    if contender.accelerated:
        accelerate.apply(module)

    def step() -> object:
        with torch.no_grad():
            return module(x)

    return step


def train_step(contender: Contender) -> Callable[[], object]:
    """Return a function that does forward, backward and fused AdamW."""
    module, x = contender.module.train(), contender.x
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    if contender.accelerated:
        accelerate.apply(module, optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        module(x).square().mean().backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class StoredWork(Work):
    """The work of a forward pass that reads its weights in the bytes they are stored in."""

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
    possible: list[Weights] = [weights for weights in stored if weights != "int8_dynamic" or has_bytes()]
    modules = {"plain float32": plain} | {weights: prepare(plain, weights) for weights in possible}
    how = "" if KERNEL.available else " (no compiler)"
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


def bench_routers(probes: Probes, *, seconds: float = 15.0) -> Iterator[Row]:
    """Time whole layers, and dispatch and combine alone, at 32 and at 1,024 experts, forward."""
    B = 8
    tokens = torch.randn(B, M, D)
    for N, P in ((32, 6), (1024, 1)):
        experts = Experts(D, H, N)
        routers: dict[str, Router] = {
            "soft": SoftRouter(D, N, P),
            "tokens choice": TokensChoiceRouter(D, N),
            "experts choice": ExpertsChoiceRouter(D, N),
        }
        capacity = TokensChoiceRouter(D, N).capacity(M)
        sparse = sparse_layer(B, M, D, H, N, capacity)
        contenders = {
            name: Contender(MoE(router, experts), tokens, soft_layer(B, M, D, H, N, P) if name == "soft" else sparse)
            for name, router in routers.items()
        }
        yield from compare(f"{N} experts, layer", contenders, probes, train=False, seconds=seconds)
        yield from compare_moves(N, routers, tokens, probes, seconds)


@torch.no_grad()
def compare_moves(N: int, routers: dict[str, Router], tokens: Tensor, probes: Probes, seconds: float) -> Iterator[Row]:
    """Time dispatch and combine alone; their work is to read and write every row, both ways."""
    functions: dict[str, Callable[[], object]] = {}
    rows: dict[str, int] = {}
    for name, router in routers.items():
        routing = router.eval()(tokens)
        functions[name] = moves(routing, tokens)
        rows[name] = routing.dispatch(tokens).shape[:2].numel()
        if isinstance(routing, SparseRouting):
            functions[f"{name}, one-hot"] = moves(OneHotRouting(routing), tokens)
            rows[f"{name}, one-hot"] = rows[name]
    timings = interleave(functions | probes.functions(), seconds=seconds)
    roofline = probes.roofline(timings)
    for name in functions:
        least = roofline.seconds(0, WORD * D * (2 * tokens.shape[:2].numel() + 2 * rows[name]))
        yield Row(f"{N} experts, dispatch + combine", "forward", name, timings[name], least / timings[name].median)


def moves(routing: Routing, tokens: Tensor) -> Callable[[], object]:
    def there_and_back() -> object:
        with torch.no_grad():
            return routing.combine(routing.dispatch(tokens))

    return there_and_back


class OneHotRouting(Routing):
    """The baseline: a sparse routing by products with one-hot (B, M, N, C) matrices, as the reference does.

    One image is a group.
    """

    def __init__(self, routing: SparseRouting):
        N, S = routing.token_of_slot_NS.shape
        images, length = routing.shape
        self.capacity = S // images
        token_NBC = routing.token_of_slot_NS.view(N, images, self.capacity)
        gate_NBC = routing.gate_NS.view(N, images, self.capacity)
        own = token_NBC < images * length
        place_NBC = torch.where(own, token_NBC % length, length)  # empty slots hold one token more
        hot_NBCM = torch.nn.functional.one_hot(place_NBC, length + 1)[..., :-1].to(gate_NBC.dtype)
        self.dispatch_BMNC = hot_NBCM.permute(1, 3, 0, 2).contiguous()
        self.combine_BMNC = (hot_NBCM * gate_NBC.unsqueeze(-1)).permute(1, 3, 0, 2).contiguous()

    def dispatch(self, x_BMD: Tensor) -> Tensor:
        return torch.einsum("bmnc,bmd->nbcd", self.dispatch_BMNC, x_BMD).flatten(1, 2)

    def combine(self, slots_NSD: Tensor) -> Tensor:
        slots_NBCD = slots_NSD.unflatten(1, (-1, self.capacity))
        return torch.einsum("bmnc,nbcd->bmd", self.combine_BMNC, slots_NBCD)

    @property
    def auxiliary_loss(self) -> Tensor:
        return self.combine_BMNC.new_zeros(())


def bench_scaling(
    probes: Probes, *, seconds: float = 15.0, counts: Sequence[int] = COUNTS, tokens: int = LONG
) -> Iterator[Row]:
    """Time throughput against the number of experts at a fixed number of slots (the paper's section 3.5).

    One image of M tokens goes through M slots, shared by 8 to M experts: equal arithmetic in all experts together.
    """
    x, hidden = torch.randn(1, tokens, NARROW), 4 * NARROW
    for N in counts:
        experts, P = Experts(NARROW, hidden, N), tokens // N
        sparse = sparse_layer(1, tokens, NARROW, hidden, N, P)
        contenders = {
            "soft": Contender(MoE(SoftRouter(NARROW, N, P), experts), x, soft_layer(1, tokens, NARROW, hidden, N, P)),
            "tokens choice": Contender(MoE(TokensChoiceRouter(NARROW, N), experts), x, sparse),
            "experts choice": Contender(MoE(ExpertsChoiceRouter(NARROW, N), experts), x, sparse),
        }
        yield from compare(f"{N} experts", contenders, probes, train=False, seconds=seconds)
