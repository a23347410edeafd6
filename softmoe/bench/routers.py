"""Time the routers on experts that they share, how they move rows, and growing numbers of experts.

Letters: B images, M tokens, D width, H hidden width, N experts, P slots per expert, C slots per expert and image,
T = B*M tokens, S rows per expert.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from softmoe.bench.cases import Contender, D, H, M, Row, compare
from softmoe.bench.timing import WORD, Probes, interleave, soft_layer, sparse_layer
from softmoe.moe import Experts, ExpertsChoiceRouter, MoE, Router, Routing, SoftRouter, TokensChoiceRouter
from softmoe.moe.routing import SparseRouting

B = 8
LONG, NARROW = 4096, 128  # tokens and width of `bench_scaling`: as many slots as tokens; 4,096 experts are 2.1 GB
COUNTS = (8, 32, 128, 512, 1024, 2048, 4096)


def bench_routers(probes: Probes, *, seconds: float = 15.0) -> Iterator[Row]:
    """Time whole layers, and dispatch and combine alone, at 32 and at 1,024 experts, forward."""
    for N, P in ((32, 6), (1024, 1)):
        experts = Experts(D, H, N)
        tokens = torch.randn(B, M, D)
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
    """Time dispatch and combine alone. Their least traffic: every row read and written, both ways."""
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
    """A sparse routing as products with (B, M, N, C) matrices of zeros and ones, as the reference does: the baseline.

    One image is a group.
    """

    def __init__(self, routing: SparseRouting):
        N, S = routing.token_of_slot_NS.shape
        images, length = routing.shape
        self.capacity = S // images
        token_NBC = routing.token_of_slot_NS.view(N, images, self.capacity)
        gate_NBC = routing.gate_NS.view(N, images, self.capacity)
        own = token_NBC < images * length
        place_NBC = torch.where(own, token_NBC % length, length)  # one token more, for empty slots
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
