"""Other PyTorch implementations of the layer, where they are installed (`pip install softmoe[peers]`).

Each is given the same width, hidden width, experts and slots, and is used as its README shows. They compute
slightly different functions (their routing departs from the paper), but the same products of the same sizes.
"""

from collections.abc import Callable
from importlib import import_module

from torch import nn


def soft_moe_pytorch(dim: int, hidden_dim: int, experts: int, slots: int) -> nn.Module:
    return import_module("soft_moe_pytorch").SoftMoE(
        dim=dim, num_experts=experts, num_slots=slots, expert_mult=hidden_dim // dim
    )


def soft_mixture_of_experts(dim: int, hidden_dim: int, experts: int, slots: int) -> nn.Module:
    """Its experts are single linears, so two of its layers make the two linears of an expert (and route twice)."""
    layer = import_module("soft_mixture_of_experts.soft_moe").SoftMoE
    return nn.Sequential(
        layer(dim, hidden_dim, num_experts=experts, slots_per_expert=slots),
        nn.GELU(),
        layer(hidden_dim, dim, num_experts=experts, slots_per_expert=slots),
    )


def soft_moe(dim: int, hidden_dim: int, experts: int, slots: int) -> nn.Module:
    mlp = import_module("timm.layers").Mlp
    wrapper = import_module("soft_moe").SoftMoELayerWrapper
    return wrapper(dim, experts, slots, mlp, in_features=dim, hidden_features=hidden_dim)


PEERS: dict[str, Callable[[int, int, int, int], nn.Module]] = {
    "soft-moe-pytorch": soft_moe_pytorch,
    "soft-mixture-of-experts": soft_mixture_of_experts,
    "soft-moe": soft_moe,
}


def available_peers() -> tuple[dict[str, Callable[[int, int, int, int], nn.Module]], list[str]]:
    """The peers that import here, and a line for each that does not."""
    found, skipped = {}, []
    for name, build in PEERS.items():
        try:
            build(8, 32, 2, 1)
        except Exception as error:  # other people's packages fail to import in many ways
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            skipped.append(f"{name}: skipped, {reason}")
        else:
            found[name] = build
    return found, skipped
