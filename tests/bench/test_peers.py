"""The rivals of the bench: each is what it claims to be, computes what ours does, and routes once."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.bench import peers
from softmoe.moe import Experts, MoE, SoftRouter

D, H, N, P = 8, 32, 3, 2


def ours(phi_DNP: Tensor, linears: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> MoE:
    """Build our layer with plain logits, exact GELU and the given weights: (w1 (D, H), b1, w2 (H, D), b2) an expert."""
    layer = MoE(SoftRouter(D, N, P, normalize=False), Experts(D, H, N, activation="gelu")).double()
    with torch.no_grad():
        layer.router.phi.copy_(phi_DNP)
        w1, b1, w2, b2 = (torch.stack(parts) for parts in zip(*linears, strict=True))
        layer.experts.w1.copy_(w1)
        layer.experts.b1.copy_(b1)
        layer.experts.w2.copy_(w2.transpose(1, 2))
        layer.experts.b2.copy_(b2)
    return layer


def looped(expert: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, second = (part for part in expert.modules() if isinstance(part, nn.Linear))
    return first.weight.T, first.bias, second.weight.T, second.bias


def make(name: str) -> nn.Module:
    """Build a rival in float64 with biases that count, or skip the test where it is not installed."""
    torch.manual_seed(0)
    pytest.importorskip(name.replace("-", "_"))
    return peers.PEERS[name](D, H, N, P).double()


def same(rival: nn.Module, layer: nn.Module, x: Tensor, seen: Tensor) -> None:
    """Outputs, and the gradients of the tokens, agree."""
    torch.testing.assert_close(rival(x), layer(seen), rtol=1e-9, atol=1e-9)
    weights = torch.randn(x.shape, dtype=x.dtype)
    gradients = [torch.autograd.grad((f * weights).sum(), x, retain_graph=True)[0] for f in (rival(x), layer(seen))]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-8, atol=1e-8)


def test_soft_mixture_of_experts_is_the_layer_without_normalization() -> None:
    """Two of its stacked linears around a GELU, one routing by plain logits."""
    rival = make("soft-mixture-of-experts")
    first, _, second = rival.experts
    linears = [(first.weight[n], first.bias[n], second.weight[n], second.bias[n]) for n in range(N)]
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    same(rival, ours(rival.phi, linears), x, x)
    assert sum(isinstance(part, type(rival)) for part in rival.modules()) == 1  # it routes once


def test_soft_moe_pytorch_is_the_layer_on_normalized_tokens() -> None:
    """Its tokens and slots are normalized to the length of the root of the width, and the normalized ones are mixed."""
    rival = make("soft-moe-pytorch")
    slots_NPD = rival.slot_norm(rival.slot_embeds)
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    layer = ours(slots_NPD.permute(2, 0, 1), [looped(expert) for expert in rival.experts.experts])
    same(rival, layer, x, rival.norm(x))
    assert not rival.experts.offload_unused_experts_to_cpu


def test_soft_moe_is_the_layer_on_tokens_of_length_one() -> None:
    """Its tokens and slots have length one, and the normalized tokens are mixed. It is built without timm."""
    torch.manual_seed(0)
    try:
        rival = peers.soft_moe(D, H, N, P).double()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    layer = ours(rival.scale * F.normalize(rival.phi, dim=0), [looped(expert) for expert in rival.experts])
    same(rival, layer, x, F.normalize(x, dim=2))


def test_missing_peers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rival that cannot be built is left out and explained in one line; the others stay."""

    def absent(*_: int) -> nn.Module:
        raise ModuleNotFoundError("No module named 'absent'\nand more")

    def broken(*_: int) -> nn.Module:
        raise RuntimeError

    here = lambda *_: nn.Identity()  # noqa: E731
    monkeypatch.setattr(peers, "PEERS", {"one": here, "two": absent, "three": broken})
    found, skipped = peers.available_peers()
    assert found == {"one": here}
    assert skipped == ["two: skipped, No module named 'absent'", "three: skipped, RuntimeError"]
