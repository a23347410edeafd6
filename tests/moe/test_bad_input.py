"""A user's mistake gives one clear ValueError, before anything is computed."""

from collections.abc import Callable

import pytest
import torch

from softmoe import SoftMoE
from softmoe.moe import (
    Experts,
    ExpertsChoiceRouter,
    IdentityRouter,
    MoE,
    SoftRouter,
    TokensChoiceRouter,
    UniformRouter,
)

SETTINGS: list[tuple[Callable[[], object], str]] = [
    (lambda: SoftMoE(8, 0), "num_experts must be at least 1, got 0"),
    (lambda: SoftMoE(0, 4), "dim must be at least 1, got 0"),
    (lambda: SoftMoE(8, 2.5), "num_experts must be a whole number, got 2.5"),  # pyright: ignore[reportArgumentType]
    (lambda: SoftMoE(8, "4"), "num_experts must be a whole number, got '4'"),  # pyright: ignore[reportArgumentType]
    (lambda: SoftMoE(8, 4, 0), "slots_per_expert must be at least 1, got 0"),
    (lambda: SoftMoE(8, 4, hidden_dim=0), "hidden_dim must be at least 1, got 0"),
    (lambda: UniformRouter(8, 4, -1), "slots_per_expert must be at least 1, got -1"),
    (lambda: IdentityRouter(8, 0), "num_experts must be at least 1, got 0"),
    (lambda: Experts(8, 16, 0), "num_experts must be at least 1, got 0"),
    (lambda: Experts(8, 16, 2, dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
    (lambda: TokensChoiceRouter(8, 0), "num_experts must be at least 1, got 0"),
    (lambda: TokensChoiceRouter(8, 4, top_k=5), "top_k must be between 1 and the 4 experts, got 5"),
    (lambda: TokensChoiceRouter(8, 4, top_k=0), "top_k must be between 1 and the 4 experts, got 0"),
    (lambda: TokensChoiceRouter(8, 4, capacity=0), "capacity must be at least 1, got 0"),
    (lambda: TokensChoiceRouter(8, 4, capacity_factor=-1.0), "capacity_factor must be above 0, got -1.0"),
    (lambda: TokensChoiceRouter(8, 4, capacity_rounding="floor"), "must be 'round' or 'ceil', got 'floor'"),
    (lambda: TokensChoiceRouter(8, 4, capacity_multiple_of=0), "capacity_multiple_of must be at least 1"),
    (lambda: TokensChoiceRouter(8, 4, group_size=0), "group_size must be at least 1, got 0"),
    (lambda: TokensChoiceRouter(8, 4, noise_std=-1.0), "noise_std must not be negative, got -1.0"),
    (lambda: SoftRouter(8, 4, noise_std=-1.0), "noise_std must not be negative, got -1.0"),
    (lambda: ExpertsChoiceRouter(8, 4, capacity=0), "capacity must be at least 1, got 0"),
    (lambda: MoE(SoftRouter(8, 4), Experts(8, 16, 5)), "disagree on num_experts: 4 and 5"),
    (lambda: MoE(SoftRouter(8, 4), Experts(9, 16, 4)), "disagree on dim: 8 and 9"),
]


@pytest.mark.parametrize(("make", "message"), SETTINGS)
def test_settings(make, message):
    """Each setting out of range is named with its value."""
    with pytest.raises(ValueError, match=message):
        make()


LAYERS = {
    "soft": lambda: SoftMoE(8, 4),
    "tokens_choice": lambda: MoE(TokensChoiceRouter(8, 4), Experts(8, 16, 4)),
    "experts_choice": lambda: MoE(ExpertsChoiceRouter(8, 4), Experts(8, 16, 4)),
    "identity": lambda: MoE(IdentityRouter(8, 4), Experts(8, 16, 4)),
    "uniform": lambda: MoE(UniformRouter(8, 4), Experts(8, 16, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_integers(name):
    """Token ids are not tokens: they are embedded first."""
    with pytest.raises(ValueError, match=r"vectors of real numbers, got torch.int64: embed indices first"):
        LAYERS[name]()(torch.zeros(2, 5, 8, dtype=torch.int64))


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_and_masks(name):
    """Wrong rank, width, number of tokens or mask: expected and given shapes are said."""
    layer = LAYERS[name]()
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match=r"expected tokens of shape \(batch, tokens, 8\), got \(2, 5, 7\)"):
        layer(torch.randn(2, 5, 7))
    with pytest.raises(ValueError, match=r"expected tokens as a tensor of torch, got ndarray"):
        layer(x.numpy())
    with pytest.raises(ValueError, match=r"got .*2, 3, 4, 5, 8"):
        layer(torch.randn(2, 3, 4, 5, 8))
    with pytest.raises(ValueError, match=r"got .*8,"):
        layer(torch.randn(8))
    with pytest.raises(ValueError, match=r"at least one token, got \(2, 0, 8\)"):
        layer(torch.randn(2, 0, 8))
    with pytest.raises(ValueError, match=r"bool mask of shape \(2, 5\).*got torch.float32 of shape \(2, 5\)"):
        layer(x, torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"bool mask of shape \(2, 5\).*got torch.bool of shape \(2, 4\)"):
        layer(x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attention masks \(causal ones among them\) cannot be honored"):
        layer(x, torch.ones(2, 5, 5, dtype=torch.bool))


def test_masks_need_tokens():
    """A mask makes no sense for single vectors and feature maps."""
    layer = SoftMoE(8, 4)
    for shape in ((2, 8), (2, 8, 3, 3)):
        with pytest.raises(ValueError, match="a mask needs tokens"):
            layer(torch.randn(shape), torch.ones(2, 1, dtype=torch.bool))


def test_feature_maps_of_another_width():
    """The width of a feature map stands second."""
    with pytest.raises(ValueError, match="expected tokens of shape"):
        SoftMoE(8, 4)(torch.randn(2, 3, 8, 8))


def test_more_capacity_than_tokens():
    """Experts Choice cannot take more tokens than a group has; it says what to change."""
    router = ExpertsChoiceRouter(8, 2, capacity_factor=4.0)
    with pytest.raises(ValueError, match="each expert would take 10 tokens of a group of 5: lower the capacity"):
        router(torch.randn(2, 5, 8))


def test_slots_of_the_wrong_shape():
    """Experts called by hand check what they get."""
    with pytest.raises(ValueError, match=r"expected slots of shape \(4, rows, 8\), got \(3, 5, 8\)"):
        Experts(8, 16, 4)(torch.randn(3, 5, 8))
