"""Count FLOPs outside the matrix products, as XLA does: 1 per element and operation; exp, tanh and rsqrt are free.

The coefficients of attention, MLP, experts, Soft, Tokens Choice and Experts Choice were read off XLA's analysis of the
reference code; whole models then agree with it to 0.002 % forward and 0.02 % in training (Tokens Choice 0.2 %). The
rest (no QK-norm, attention pooling, the tanh layer, fixed routers) follows from the same terms and is an estimate.
All of it is under 1 % of a usual model. Letters: see parts.py.
"""

from fractions import Fraction
from typing import NamedTuple

from softmoe.budget.parts import SPARSE, Routed, routed
from softmoe.models import ViTConfig


class RouterTerms(NamedTuple):
    """Coefficients of M*D, S*H, S*D, logits (M*slots, or M*N for sparse routers) and entries of the one-hot mask."""

    tokens: int
    hidden: int
    rows: int
    logits: int
    mask: int = 0


class Terms(NamedTuple):
    """Coefficients per block of M*D, A*M*M, A*M and M; of M*H per dense MLP; of M*D once; of the classes once."""

    tokens: int
    pairs: int
    head_rows: int
    token_rows: int
    hidden: int
    outside: int
    classes: int
    qk_norm: tuple[int, int]  # what is saved without it: M*D and A*M
    pool: int
    routers: dict[str, RouterTerms]


FORWARD = Terms(
    tokens=34,
    pairs=4,
    head_rows=7,
    token_rows=8,
    hidden=9,
    outside=12,
    classes=0,
    qk_norm=(12, 7),
    pool=1,
    routers={
        "soft": RouterTerms(4, 9, 3, 8),
        "soft_uniform": RouterTerms(4, 9, 3, 8),
        "uniform_soft": RouterTerms(4, 9, 3, 8),
        "uniform": RouterTerms(0, 9, 3, 8),
        "identity": RouterTerms(0, 9, 4, 0),
        "tokens_choice": RouterTerms(0, 9, 4, 4, mask=5),
        "experts_choice": RouterTerms(0, 9, 4, 4, mask=5),
    },
)
TRAIN = Terms(
    tokens=94,
    pairs=10,
    head_rows=35,
    token_rows=34,
    hidden=24,
    outside=27,
    classes=14,
    qk_norm=(40, 35),
    pool=3,
    routers={
        "soft": RouterTerms(14, 24, 7, 22),
        "soft_uniform": RouterTerms(14, 24, 7, 15),
        "uniform_soft": RouterTerms(14, 24, 7, 15),
        "uniform": RouterTerms(0, 24, 7, 8),
        "identity": RouterTerms(0, 24, 9, 0),
        "tokens_choice": RouterTerms(0, 24, 9, 280, mask=9),
        "experts_choice": RouterTerms(0, 24, 9, 90, mask=9),
    },
)


def elementwise(config: ViTConfig, terms: Terms, *, one_hot: bool = False) -> int:
    """Return the FLOPs per image outside matrix products, forward (FORWARD) or forward and backward (TRAIN)."""
    c, t = config, terms
    M, D, A, H, L = c.tokens, c.width, c.heads, c.mlp_dim, c.depth
    tokens, head_rows = t.tokens, t.head_rows
    if not c.qk_norm:
        tokens, head_rows = tokens - t.qk_norm[0], head_rows - t.qk_norm[1]
    block = tokens * M * D + t.pairs * A * M**2 + head_rows * A * M + t.token_rows * M
    moe = routed(c)
    dense = L - (moe.layers if moe else 0)
    total = Fraction(L * block + dense * t.hidden * M * H + t.outside * M * D + t.classes * (c.num_classes or 0))
    if c.pool == "attention":
        total += t.pool * (8 * M * D + 4 * A * M + 9 * H + 20 * D)
    total += t.pool * (c.representation_size or 0)
    if moe:
        total += moe.layers * router_flops(c, moe, t.routers[moe.router], one_hot)
    return round(total)


def router_flops(config: ViTConfig, moe: Routed, terms: RouterTerms, one_hot: bool) -> Fraction:
    M, D, H = config.tokens, config.width, config.mlp_dim
    logits = M * (moe.experts if moe.router in SPARSE else moe.slots)
    flops = terms.tokens * M * D + terms.logits * logits + moe.rows * (terms.hidden * H + terms.rows * D)
    return flops + (terms.mask * moe.mask if one_hot else 0)
