"""Find the MLPs of any library's model, recognize them by what they compute, and stack copies of them as experts.

Letters: N experts, S rows per expert, D width, H hidden width.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.moe import Experts, MoE
from softmoe.moe.experts import ACTIVATIONS, make_gelu

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    **{name: make_gelu(name) for name in ACTIVATIONS},
}
Affine = tuple[Tensor, Tensor]  # weight and bias
TOLERANCE = 1e-6  # relative, in float64: two forms of GELU are farther apart


def find_modules(model: nn.Module, mlps: str | Sequence[str]) -> list[str]:
    """Find the modules whose names match, in the model's order. ValueError that says what to name otherwise."""
    patterns = [mlps] if isinstance(mlps, str) else mlps
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        got = repr(mlps) if isinstance(mlps, Sequence) else f"a {type(mlps).__name__}"
        raise ValueError(f"mlps must be the name of modules, as in 'blocks.*.mlp', or a list of names, got {got}")
    modules = named_places(model)
    found = {name for pattern in patterns for name in matches(modules, pattern, type(model).__name__)}
    names = [name for name in modules if name in found]
    first_names: dict[nn.Module, str] = {}
    for name in names:
        if any(isinstance(part, MoE) for part in modules[name].modules()):
            raise ValueError(f"{name} has experts already")
        if isinstance(modules[name], nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            raise ValueError(
                f"{name} is a whole nn.{type(modules[name]).__name__}, with attention, and its MLP (linear1 and "
                "linear2) is no module of its own: write the block with one, and name that"
            )
        if "_orig_mod" in name.split("."):
            raise ValueError(f"{name} is compiled, and would not see the change: upcycle_ first, then torch.compile")
        if outer := next((other for other in names if name.startswith(f"{other}.")), None):
            raise ValueError(f"mlps= matches {outer} and {name} inside it: name one of the two")
        if (first := first_names.setdefault(modules[name], name)) != name:
            raise ValueError(
                f"{first} and {name} are one module, which cannot have experts of its own in each place: "
                "give every block a copy.deepcopy of it before, or name one place"
            )
    return names


def named_places(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules by name: one in two places has two names, one in a part that has two names has the first."""
    everything = dict(model.named_modules(remove_duplicate=False))
    places: dict[tuple[nn.Module, str], str] = {}
    for name in everything:
        parent, _, leaf = name.rpartition(".")
        places.setdefault((everything[parent], leaf), name)
    return {name: everything[name] for name in places.values() if name}


def matches(modules: dict[str, nn.Module], pattern: str, model: str) -> list[str]:
    """List the names that a pattern matches; it may leave out what comes before, if that is one part of the model."""
    if pattern in modules:
        return [pattern]
    words = re.escape(pattern).replace(r"\*", r"[^.]+")
    found = {name: match for name in modules if (match := re.fullmatch(rf"(.*\.)?{words}", name))}
    if not found:
        known = {name: without_numbers(name) for name in modules}
        likely = dict.fromkeys(known[name] for name in known if is_mlp(modules[name]))
        near = [*likely, *difflib.get_close_matches(pattern, dict.fromkeys(known.values()), n=3, cutoff=0.5)]
        listed = ", ".join(dict.fromkeys(near[:6]))
        raise ValueError(
            f"mlps={pattern!r} matches no module of this {model}"
            + (f"; close names are {listed}" if listed else "; name the modules in which its MLPs are")
        )
    parts = list(dict.fromkeys(without_numbers(match[1] or "") for match in found.values()))
    if len(parts) > 1:
        full = " and ".join(repr(part + pattern) for part in parts)
        raise ValueError(
            f"mlps={pattern!r} matches in several parts of this {model}: name the one you mean, or list them, of "
            f"{full}; slots mix all tokens of an input, so that words of a text would see later ones"
        )
    return list(found)


def without_numbers(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def pick_blocks(names: list[str], blocks: str | Sequence[int]) -> list[str]:
    """Keep the matches that the option `blocks` asks for."""
    if blocks == "all":
        return names
    if blocks == "last_half":
        return names[len(names) - len(names) // 2 :] if len(names) > 1 else names
    known = isinstance(blocks, Sequence) and all(index in range(len(names)) for index in blocks)
    if isinstance(blocks, str) or not known or not blocks:
        raise ValueError(f"blocks must be 'all', 'last_half' or indices of the {len(names)} matches, got {blocks!r}")
    return [names[index] for index in sorted(set(blocks))]


def is_mlp(module: nn.Module) -> bool:
    """Tell if a module looks like an MLP: one or two linear layers to a larger width, and one back."""
    found = linears(module)
    D = min((part.in_features for part in found), default=0)
    back = [part for part in found if part.out_features == D < part.in_features]
    return (len(found) in (2, 3) and len(back) == 1) or is_split(module)


def is_split(module: nn.Module) -> bool:
    """Tell if this is a block whose MLP lies in two modules, `intermediate` and `output`."""
    halves = (getattr(module, name, None) for name in ("intermediate", "output"))
    return all(isinstance(getattr(half, "dense", None), nn.Linear) for half in halves)


def whole_mlp(module: nn.Module, name: str) -> nn.Module:
    """Return the MLP as one module, whose input and output are tokens."""
    if not is_split(module):
        if not matrices(module):
            raise ValueError(f"{name} is a {type(module).__name__} without a linear layer: mlps= must name MLPs")
        return module
    if any(isinstance(part, nn.LayerNorm) for part in module.output.modules()):  # pyright: ignore
        raise ValueError(f"{name} has a norm after its sum (as in BERT), so its MLP cannot be exchanged alone")
    return TwoModuleMLP(module.intermediate, module.output)  # pyright: ignore


class TwoModuleMLP(nn.Module):
    """One MLP made of two modules. Where the second would add the residual (ViT, not Swin) it is given zeros to add."""

    def __init__(self, intermediate: nn.Module, output: nn.Module):
        super().__init__()
        self.intermediate = intermediate
        self.output = output
        taken = list(inspect.signature(output.forward).parameters.values())
        self.adds_residual = len(taken) > 1 or taken[0].kind is inspect.Parameter.VAR_POSITIONAL

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.intermediate(x)
        return self.output(hidden, torch.zeros_like(x)) if self.adds_residual else self.output(hidden)


class AddResidual(nn.Module):
    """The part of Hugging Face's `output` module that stays: the sum with the residual, where it is given one."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x if residual is None else x + residual


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
            experts = GatedExperts(D, H, num_experts, self.activation, self.dropout)
            experts.gate.copy_(self.gate[0].T.expand_as(experts.gate))
            experts.gate_bias.copy_(self.gate[1].expand_as(experts.gate_bias))
        stacked = (experts.w1, experts.b1, experts.w2, experts.b2)
        for parameter, value in zip(stacked, (self.first[0].T, self.first[1], *self.second), strict=True):
            parameter.copy_(value.expand_as(parameter))
        return experts


class GatedExperts(nn.Module):
    """N gated MLPs (SwiGLU and the like) as stacked weights, laid out as those of Experts: (N, S, D) -> (N, S, D)."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, activation: str = "silu", dropout: float = 0.0):
        super().__init__()
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        self.activation, self.dropout = activation, dropout
        self.gate, self.w1, self.w2 = (nn.Parameter(torch.empty(num_experts, dim, hidden_dim)) for _ in range(3))
        self.gate_bias, self.b1 = (nn.Parameter(torch.zeros(num_experts, hidden_dim)) for _ in range(2))
        self.b2 = nn.Parameter(torch.zeros(num_experts, dim))

    def forward(self, x_NSD: Tensor) -> Tensor:
        gate_NSH = GATES[self.activation](torch.baddbmm(self.gate_bias.unsqueeze(1), x_NSD, self.gate))
        hidden_NSH = gate_NSH * torch.baddbmm(self.b1.unsqueeze(1), x_NSD, self.w1)
        active_NSH = F.dropout(hidden_NSH, self.dropout, self.training)
        y_NSD = torch.baddbmm(self.b2.unsqueeze(1), active_NSH, self.w2.transpose(1, 2))
        return F.dropout(y_NSD, self.dropout, self.training)

    def extra_repr(self) -> str:
        return f"{self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}"


def linears(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """List the weights of linear layers of any kind, convolutions and plain parameters among them."""
    return [weight for weight in module.parameters() if weight.ndim > 1 and weight.is_floating_point()]


def has_channels_first(module: nn.Module) -> bool:
    """Tell if a module takes (B, D, ...): its linear layers are convolutions."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return not linears(module) and any(isinstance(part, convolutions) for part in module.modules())


def hidden_width(module: nn.Module, dim: int) -> int:
    """Return H, the largest width that a linear layer brings back to D; 4 D where no linear layer does."""
    return max((part.in_features for part in linears(module) if part.out_features == dim), default=4 * dim)


@torch.no_grad()
def token_width(module: nn.Module) -> int | None:
    """Find D, the width of tokens that the module takes and returns, by trying; None if it takes more than tokens.

    The order of its layers would not tell: libraries register them in any order."""
    weights = matrices(module)
    for D in dict.fromkeys(size for weight in weights for size in weight.shape[:2]):
        shapes = [(1, D, 1), (1, D, 1, 1)] if has_channels_first(module) else [(1, 1, D), (1, 1, 1, D)]
        if any(try_module(module, weights[0].new_zeros(shape)) is not None for shape in shapes):
            return D
    return None


def try_module(module: nn.Module, x: Tensor) -> Any:
    """Return the module's output for tokens alone; None if it fails or returns another shape."""
    try:
        output = module(x)
    except Exception:  # of any kind: the module is anybody's
        return None
    return output if returns_shape(output, x) else None


def returns_shape(output: Any, x: Tensor) -> bool:
    """Tell if a module's output, or the first part of it, has the shape of its input."""
    first = output[0] if isinstance(output, tuple) and output else output
    return isinstance(first, Tensor) and first.shape == x.shape


@torch.no_grad()
def read_mlp(module: nn.Module, name: str) -> DenseMLP:
    """Recognize the MLP in a module by what it computes for random inputs. ValueError if it has none of our forms."""
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(f"{name} has no storage (meta device), so it cannot be copied: use init='beside'")
    exact = deepcopy(module).cpu().double().eval()  # some devices have no float64
    D = token_width(exact) or 1
    x = torch.randn(1, 16, D, dtype=torch.float64, device="cpu")
    target = try_module(exact, x)
    best = None
    if isinstance(target, Tensor):
        best = min(possible_mlps(exact, D), key=lambda form: float((form(x) - target).norm()), default=None)
    if best is None or not (best(x) - target).norm() < TOLERANCE * target.norm():
        raise ValueError(
            f"{name}, a {type(module).__name__}, is neither linear, GELU, linear nor a gated MLP of three matrices, so "
            "copies cannot take its place: use init='beside', which keeps it as it is"
        )
    dropout = max((part.p for part in module.modules() if isinstance(part, nn.Dropout)), default=0.0)
    return DenseMLP(best.first, best.second, best.gate, best.activation, dropout)


def possible_mlps(module: nn.Module, dim: int) -> Iterator[DenseMLP]:
    """List every MLP from width D and back that the shapes of a module's linear layers allow, in any order."""
    found = [(p.weight, p.weight.new_zeros(p.out_features) if p.bias is None else p.bias) for p in linears(module)]
    if len(found) not in (2, 3):
        return
    for *up, second in permutations(found):
        H = second[0].shape[1]
        shapes = [tuple(weight.shape) for weight, _ in (*up, second)]
        if shapes == [(H, dim), (dim, H)]:
            yield from (DenseMLP(up[0], second, None, name) for name in ACTIVATIONS)
        elif shapes == [(2 * H, dim), (dim, H)]:
            weight, bias = up[0]
            yield from gated_mlps((weight[:H], bias[:H]), (weight[H:], bias[H:]), second)
            yield from gated_mlps((weight[H:], bias[H:]), (weight[:H], bias[:H]), second)
        elif shapes == [(H, dim), (H, dim), (dim, H)]:
            yield from gated_mlps(up[0], up[1], second)


def gated_mlps(gate: Affine, first: Affine, second: Affine) -> Iterator[DenseMLP]:
    yield from (DenseMLP(first, second, gate, name) for name in GATES)
