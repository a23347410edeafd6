"""Recognize the MLP of any library's model by what it computes, and stack copies of it as experts.

Letters: N experts, S rows per expert, D width, H hidden width.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.moe import Experts
from softmoe.moe.experts import ACTIVATIONS, make_gelu

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    **{name: make_gelu(name) for name in ACTIVATIONS},
}
Affine = tuple[Tensor, Tensor]  # weight and bias
TOLERANCE = 1e-6  # relative, in float64: two forms of GELU are farther apart


class TwoModuleMLP(nn.Module):
    """One MLP made of two modules, of which the second would add the residual: it is given zeros to add."""

    def __init__(self, intermediate: nn.Module, output: nn.Module):
        super().__init__()
        self.intermediate = intermediate
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.intermediate(x), torch.zeros_like(x))


@dataclass(frozen=True)
class DenseMLP:
    """An MLP by its weights, as nn.Linear stores them, and its activation.

    It computes act(x w1 + b1) w2 + b2, or with a gate (act(x gate + c) * (x w1 + b1)) w2 + b2.
    """

    first: Affine
    second: Affine
    gate: Affine | None
    activation: str
    dropout: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, *self.first)
        if self.gate is None:
            return F.linear(make_gelu(self.activation)(hidden), *self.second)
        return F.linear(GATES[self.activation](F.linear(x, *self.gate)) * hidden, *self.second)

    def copies(self, num_experts: int) -> nn.Module:
        """Make N experts, each of them this MLP."""
        H, D = self.first[0].shape
        if self.gate is None:
            experts = Experts(D, H, num_experts, dropout=self.dropout, activation=self.activation)
        else:
            experts = GatedExperts(D, H, num_experts, self.activation)
            experts.gate.copy_(self.gate[0].T.expand_as(experts.gate))
            experts.gate_bias.copy_(self.gate[1].expand_as(experts.gate_bias))
        stacked = (experts.w1, experts.b1, experts.w2, experts.b2)
        for parameter, value in zip(stacked, (self.first[0].T, self.first[1], *self.second), strict=True):
            parameter.copy_(value.expand_as(parameter))
        return experts


class GatedExperts(nn.Module):
    """N gated MLPs (SwiGLU and the like) as stacked weights, laid out as those of Experts: (N, S, D) -> (N, S, D)."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, activation: str = "silu"):
        super().__init__()
        self.dim, self.hidden_dim, self.num_experts, self.activation = dim, hidden_dim, num_experts, activation
        self.gate, self.w1, self.w2 = (nn.Parameter(torch.empty(num_experts, dim, hidden_dim)) for _ in range(3))
        self.gate_bias, self.b1 = (nn.Parameter(torch.zeros(num_experts, hidden_dim)) for _ in range(2))
        self.b2 = nn.Parameter(torch.zeros(num_experts, dim))

    def forward(self, x_NSD: Tensor) -> Tensor:
        gate_NSH = GATES[self.activation](torch.baddbmm(self.gate_bias.unsqueeze(1), x_NSD, self.gate))
        active_NSH = gate_NSH * torch.baddbmm(self.b1.unsqueeze(1), x_NSD, self.w1)
        return torch.baddbmm(self.b2.unsqueeze(1), active_NSH, self.w2.transpose(1, 2))

    def extra_repr(self) -> str:
        return f"{self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}"


def linears(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def hidden_width(module: nn.Module) -> int:
    """Return H, the width that the last matrix reads."""
    return linears(module)[-1].in_features


@torch.no_grad()
def read_mlp(module: nn.Module, name: str) -> DenseMLP:
    """Recognize the MLP in a module by what it computes for random inputs. ValueError if it has none of our forms."""
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(f"{name} has no storage (meta device), so it cannot be copied: use init='beside'")
    exact = deepcopy(module).double().eval()
    x = torch.randn(16, linears(module)[0].in_features, dtype=torch.float64, device=linears(exact)[0].weight.device)
    target = exact(x)
    dropout = max((part.p for part in module.modules() if isinstance(part, nn.Dropout)), default=0.0)
    best = min(possible_mlps(exact), key=lambda form: float((form(x) - target).norm()), default=None)
    if best is None or not (best(x) - target).norm() < TOLERANCE * target.norm():
        raise ValueError(
            f"{name}, a {type(module).__name__}, is neither linear, GELU, linear nor a gated MLP of three matrices, so "
            "copies cannot take its place: use init='beside', which keeps it as it is"
        )
    return DenseMLP(best.first, best.second, best.gate, best.activation, dropout)


def possible_mlps(module: nn.Module) -> Iterator[DenseMLP]:
    """List every MLP that the shapes of a module's linear layers allow."""
    found = [(p.weight, p.weight.new_zeros(p.out_features) if p.bias is None else p.bias) for p in linears(module)]
    if len(found) == 2:
        first, second = found
        H = second[0].shape[1]
        if first[0].shape[0] == H:
            yield from (DenseMLP(first, second, None, name) for name in ACTIVATIONS)
        if first[0].shape[0] == 2 * H:
            yield from gated_mlps((first[0][:H], first[1][:H]), (first[0][H:], first[1][H:]), second)
    elif len(found) == 3 and found[0][0].shape == found[1][0].shape:
        yield from gated_mlps(*found)


def gated_mlps(a: Affine, b: Affine, second: Affine) -> Iterator[DenseMLP]:
    """List the gated MLPs in which either of `a` and `b` is the gate: libraries differ in which comes first."""
    for gate, first in ((a, b), (b, a)):
        yield from (DenseMLP(first, second, gate, name) for name in GATES)
