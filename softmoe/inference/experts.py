"""Experts whose weights are packed for inference.

Letters: N experts, S rows per expert, D width, H hidden width.
"""

from collections.abc import Callable

from torch import Tensor, nn

from softmoe.inference.dynamic import ByteLinear
from softmoe.inference.packed import PackedLinear, Weights
from softmoe.moe import Experts
from softmoe.moe.experts import make_gelu


class PreparedExperts(nn.Module):
    """(N, S, D) -> (N, S, D), as `Experts` in evaluation mode, from weights of fewer bits."""

    def __init__(self, experts: Experts, weights: Weights):
        super().__init__()
        N, D, H = experts.num_experts, experts.dim, experts.hidden_dim
        self.dim, self.hidden_dim, self.num_experts = D, H, N
        self.activation = experts.activation
        self.gelu = make_gelu(experts.activation)
        self.first = stack(lambda n: experts.w1[n], (N, D, H), experts.b1, weights)
        self.second = stack(lambda n: experts.w2[n].T, (N, H, D), experts.b2, weights)

    def forward(self, x_NSD: Tensor) -> Tensor:
        if x_NSD.ndim != 3 or x_NSD.shape[0] != self.num_experts or x_NSD.shape[2] != self.dim:
            raise ValueError(
                f"expected slots of shape ({self.num_experts}, rows, {self.dim}), got {tuple(x_NSD.shape)}"
            )
        active_NSH = self.gelu(self.first(x_NSD))
        return self.second(active_NSH)


def stack(
    get: Callable[[int], Tensor], shape: tuple[int, int, int], bias: Tensor, weights: Weights
) -> PackedLinear | ByteLinear:
    return ByteLinear(get, shape, bias) if weights == "int8_dynamic" else PackedLinear(get, shape, bias, weights)
