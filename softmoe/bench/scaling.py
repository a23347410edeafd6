"""Throughput against the number of experts, at a fixed number of slots (the paper's section 3.5).

Letters: M tokens, D width, H hidden width, N experts, P slots per expert.
"""

from collections.abc import Iterator, Sequence

import torch

from softmoe.bench.cases import Contender, Row, compare
from softmoe.bench.roofline import Probes
from softmoe.bench.work import soft_layer, sparse_layer
from softmoe.moe import Experts, ExpertsChoiceRouter, MoE, SoftRouter, TokensChoiceRouter

M, D, H = 4096, 128, 512  # as many slots as tokens; 4,096 experts are 2.1 GB
COUNTS = (8, 32, 128, 512, 1024, 2048, 4096)


def bench_scaling(
    probes: Probes, *, seconds: float = 15.0, counts: Sequence[int] = COUNTS, tokens: int = M
) -> Iterator[Row]:
    """One image of M tokens through M slots, shared by 8 to M experts: equal arithmetic in all experts together."""
    x = torch.randn(1, tokens, D)
    for N in counts:
        experts, P = Experts(D, H, N), tokens // N
        sparse = sparse_layer(1, tokens, D, H, N, P)
        contenders = {
            "soft": Contender(MoE(SoftRouter(D, N, P), experts), x, soft_layer(1, tokens, D, H, N, P)),
            "tokens choice": Contender(MoE(TokensChoiceRouter(D, N), experts), x, sparse),
            "experts choice": Contender(MoE(ExpertsChoiceRouter(D, N), experts), x, sparse),
        }
        yield from compare(f"{N} experts", contenders, probes, train=False, seconds=seconds)
