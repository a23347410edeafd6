"""The MoE layer: a router and experts, in place of an MLP or beside one.

Letters: B images, M tokens, D width, N experts, S rows per expert.
"""

from torch import Tensor, nn

from softmoe.moe.experts import Experts
from softmoe.moe.routing import Router, Routing, check_tokens
from softmoe.moe.soft import SoftRouter


class MoE(nn.Module):
    """A router and experts as one layer, (B, M, D) -> (B, M, D).

    `mask` is True at real tokens; the others are not read and receive zero. `grid` is (rows, columns) of the image's
    patches, for routers that use the place of a token.
    """

    def __init__(self, router: Router, experts: nn.Module):
        super().__init__()
        for name in ("dim", "num_experts"):
            ours, theirs = getattr(router, name), getattr(experts, name, None)
            if theirs is not None and ours != theirs:
                raise ValueError(f"router and experts disagree on {name}: {ours} and {theirs}")
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
        real_BMD = x if mask is None else zero_masked(x, mask, self.router.dim)
        routing = self.route(real_BMD, mask, grid)
        slots_NSD = routing.dispatch(real_BMD)
        outputs_NSD = self.experts(slots_NSD)
        return routing.combine(outputs_NSD)

    def route(self, x_BMD: Tensor, mask: Tensor | None, grid: tuple[int, int] | None) -> Routing:
        return self.router(x_BMD, mask, grid) if self.router.takes_grid else self.router(x_BMD, mask)


def zero_masked(x_BMD: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return the tokens with zeros at masked ones: a weight of 0 does not hide NaN or infinity."""
    check_tokens(x_BMD, mask, dim)
    return x_BMD.masked_fill(~mask.unsqueeze(-1), 0.0)


class SoftMoE(MoE):
    """The ready-made Soft MoE layer, a replacement for an MLP.

    It takes tokens (B, M, D), single vectors (B, D) and feature maps (B, D, height, width) and returns the same shape.
    About as many slots (experts x slots per expert) as tokens cost as much as one MLP. The number of slots is fixed,
    the number of tokens is free. `normalize`, `noise_std` and `scale_init` are options of the router (see SoftConfig),
    `activation`, `dropout` and `identical_init` of the experts (see Experts).
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        slots_per_expert: int = 1,
        hidden_dim: int | None = None,
        *,
        normalize: bool = True,
        noise_std: float = 0.0,
        scale_init: float = 1.0,
        activation: str = "gelu_tanh",
        dropout: float = 0.0,
        identical_init: bool = False,
    ):
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        super().__init__(
            SoftRouter(
                dim, num_experts, slots_per_expert, normalize=normalize, noise_std=noise_std, scale_init=scale_init
            ),
            Experts(
                dim, hidden_dim, num_experts, dropout=dropout, identical_init=identical_init, activation=activation
            ),
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None, *, is_causal: bool = False
    ) -> Tensor:
        if is_causal:
            raise ValueError(
                "Soft MoE cannot be causal: every slot averages all tokens of the sequence, so each output would see "
                "the future. Use it in encoders, or a router that treats tokens one by one"
            )
        if not isinstance(x, Tensor) or x.ndim == 3:
            return super().forward(x, mask, grid)
        if mask is not None:
            raise ValueError(f"a mask needs tokens of shape (batch, tokens, dim), got {tuple(x.shape)}")
        if x.ndim == 2:
            return super().forward(x.unsqueeze(1)).squeeze(1)
        if x.ndim == 4:
            return super().forward(x.flatten(2).transpose(1, 2)).transpose(1, 2).view_as(x)
        raise ValueError(
            f"expected (batch, tokens, dim), (batch, dim) or (batch, dim, height, width), got {tuple(x.shape)}"
        )


class ExpertsBeside(MoE):
    """A kept MLP with experts beside it: y = mlp(x) + combine(experts(dispatch(x))).

    The experts do not read masked tokens, which receive mlp(x) alone.

    `mlp` is any (B, M, D) -> (B, M, D) module. The experts' output matrix and bias start at zero, so that a trained
    model whose MLP becomes this one gives at first exactly what it gave before. Experts may be narrow (hidden width R
    far below the MLP's H) and slots few: S slots for M tokens cost 3 M S D + 2 S R D multiply-accumulates beside the
    MLP's 2 M H D.
    """

    def __init__(self, mlp: nn.Module, router: Router, experts: Experts):
        nn.init.zeros_(experts.w2)
        nn.init.zeros_(experts.b2)
        experts.zero_output = True  # also when they are reset, before or after this layer
        super().__init__(router, experts)
        self.mlp = mlp

    def forward(self, x: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
        return self.mlp(x) + super().forward(x, mask, grid)
