"""N independent MLPs as stacked weights: one batched product per linear layer, no loop over experts.

Letters: N experts, S rows per expert, D width, H hidden width.

Both weights are stored as (N, D, H): with few rows per expert the time is that of reading the weights, and the second
product reads rows of H numbers faster than rows of D.

The initializers of all layers are here and are told the fans: torch would read wrong ones off stacked and packed
tensors. They skip the meta device, where there is nothing to fill and torch would spend seconds.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.moe.routing import at_least_one


class QuickGELU(nn.Module):
    """The approximation x * sigmoid(1.702 x) of the GELU, as OpenAI's CLIP has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "gelu": nn.GELU,
    "quick_gelu": QuickGELU,
}


def lecun_normal_(weight: Tensor, fan_in: int) -> None:
    """Draw from a normal of variance 1/fan_in, cut at two standard deviations, which leaves 0.8796 of the deviation."""
    std = math.sqrt(1.0 / fan_in) / 0.87962566103423978
    if not weight.is_meta:
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def xavier_uniform_(weight: Tensor, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(6.0 / (fan_in + fan_out))
    if not weight.is_meta:
        nn.init.uniform_(weight, -bound, bound)


def normal_(weight: Tensor, std: float) -> None:
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def make_gelu(activation: str) -> nn.Module:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return ACTIVATIONS[activation]()


def check_slots(x_NSD: Tensor, num_experts: int, dim: int) -> None:
    if x_NSD.ndim != 3 or x_NSD.shape[0] != num_experts or x_NSD.shape[2] != dim:
        raise ValueError(f"expected slots of shape ({num_experts}, rows, {dim}), got {tuple(x_NSD.shape)}")


class Experts(nn.Module):
    """N experts in one module, (N, S, D) -> (N, S, D): each computes gelu(x w1 + b1) w2^T + b2 with its own weights.

    `identical_init=True` starts all experts as copies of one draw, as the reference code does; the router must
    then break the symmetry. False draws each expert on its own. `activation` is gelu_tanh (the paper's code), gelu
    (exact) or quick_gelu (CLIP).
    """

    zero_output = False
    """Start with an output matrix and bias of zero: a layer may set this (ExpertsBeside does)."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        dropout: float = 0.0,
        identical_init: bool = False,
        activation: str = "gelu_tanh",
    ):
        super().__init__()
        D, H = at_least_one("dim", dim), at_least_one("hidden_dim", hidden_dim)
        N = at_least_one("num_experts", num_experts)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.dim, self.hidden_dim, self.num_experts = D, H, N
        self.dropout = dropout
        self.identical_init = identical_init
        self.activation = activation
        self.gelu = make_gelu(activation)
        self.w1 = nn.Parameter(torch.empty(N, D, H))
        self.b1 = nn.Parameter(torch.empty(N, H))
        self.w2 = nn.Parameter(torch.empty(N, D, H))
        self.b2 = nn.Parameter(torch.empty(N, D))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights with the fans of one expert (D and H), never those of the stacked tensor."""
        drawn = slice(0, 1) if self.identical_init else slice(None)
        with torch.no_grad():
            for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
                xavier_uniform_(weight[drawn], self.dim, self.hidden_dim)
                normal_(bias[drawn], std=1e-6)
                if self.identical_init:
                    weight[1:], bias[1:] = weight[:1], bias[:1]
        if self.zero_output:
            nn.init.zeros_(self.w2)
            nn.init.zeros_(self.b2)

    def forward(self, x_NSD: Tensor) -> Tensor:
        check_slots(x_NSD, self.num_experts, self.dim)
        hidden_NSH = torch.baddbmm(self.b1.unsqueeze(1), x_NSD, self.w1)
        active_NSH = F.dropout(self.gelu(hidden_NSH), self.dropout, self.training)
        # w2 is the left factor, so that autograd makes its gradient in w2's own layout
        y_NDS = torch.baddbmm(self.b2.unsqueeze(2), self.w2, active_NSH.transpose(1, 2))
        return F.dropout(y_NDS.transpose(1, 2), self.dropout, self.training)

    def extra_repr(self) -> str:
        return f"{self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}"
