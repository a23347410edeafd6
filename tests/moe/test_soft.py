"""Soft routing against plain loops, and the properties the paper's formulas have."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmoe import SoftMoE
from softmoe.moe import DenseRouting, SoftRouter, SoftUniformRouter, UniformSoftRouter

SIZES = st.tuples(*[st.integers(1, high) for high in (3, 6, 5, 4, 3)])  # B, M, D, N, P
SEEDS = st.integers(0, 2**31)


def make_layer(D: int, N: int, P: int, seed: int = 0, **options) -> SoftMoE:
    """A float64 layer far from its calm start: sharp logits, biases that matter."""
    torch.manual_seed(seed)
    layer = SoftMoE(D, N, P, hidden_dim=2 * D, **options).double()
    with torch.no_grad():
        if layer.router.scale is not None:
            layer.router.scale.fill_(3.7)
        layer.experts.b1.normal_()
        layer.experts.b2.normal_()
    return layer


def random_mask(B: int, M: int) -> torch.Tensor:
    return torch.rand(B, M) < 0.6


def plain_output(layer: SoftMoE, x: torch.Tensor, mask: torch.Tensor | None = None) -> np.ndarray:
    router = layer.router
    scale = None if router.scale is None else router.scale.item()
    logits = oracle.soft_logits(x.numpy(), router.phi.detach().numpy(), scale)
    mask_array = None if mask is None else mask.numpy()
    dispatch = oracle.dispatch_weights(logits, mask_array)
    combine = oracle.combine_weights(logits, mask_array)
    return oracle.dense_layer(x.numpy(), dispatch, combine, oracle.ExpertWeights.of(layer.experts))


@given(SIZES, SEEDS, st.booleans(), st.booleans())
def test_output_equals_the_plain_loops(sizes, seed, normalize, masked):
    """The layer is Algorithm 1, with and without normalization and padding."""
    B, M, D, N, P = sizes
    layer = make_layer(D, N, P, seed, normalize=normalize)
    x = torch.randn(B, M, D, dtype=torch.float64)
    mask = random_mask(B, M) if masked else None
    torch.testing.assert_close(layer(x, mask).detach().numpy(), plain_output(layer, x, mask), rtol=1e-11, atol=1e-11)


@given(SIZES, SEEDS, st.sampled_from([SoftRouter, SoftUniformRouter, UniformSoftRouter]))
def test_weights_sum_to_one(sizes, seed, kind):
    """Each slot is an average of tokens (dispatch columns sum to 1), each token an average of slots."""
    B, M, D, N, P = sizes
    torch.manual_seed(seed)
    routing = kind(D, N, P, scale_init=20.0).double()(torch.randn(B, M, D, dtype=torch.float64))
    ones = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(routing.dispatch_weights.sum(1), ones.expand(B, N, P))
    torch.testing.assert_close(routing.combine_weights.sum((2, 3)), ones.expand(B, M))
    assert routing.dispatch_weights.min() >= 0
    assert routing.combine_weights.min() >= 0


@given(SIZES, SEEDS)
def test_tokens_may_be_permuted(sizes, seed):
    """The order of tokens carries no meaning: permuted tokens give permuted outputs."""
    B, M, D, N, P = sizes
    layer = make_layer(D, N, P, seed)
    x = torch.randn(B, M, D, dtype=torch.float64)
    order = torch.randperm(M)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order])


@given(SIZES, SEEDS)
def test_images_do_not_see_each_other(sizes, seed):
    """A batch gives what its images give one by one, and no gradient crosses from one to another."""
    B, M, D, N, P = sizes
    layer = make_layer(D, N, P, seed)
    x = torch.randn(B, M, D, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, torch.cat([layer(image[None]) for image in x]))
    (gradient,) = torch.autograd.grad(y[0].sum(), x)
    assert gradient[1:].abs().sum() == 0


@given(SIZES, SEEDS)
def test_slots_of_an_expert_and_experts_may_be_permuted(sizes, seed):
    """Slot (n, p) belongs to expert n: experts moved together with their slot vectors change nothing."""
    B, M, D, N, P = sizes
    layer = make_layer(D, N, P, seed)
    x = torch.randn(B, M, D, dtype=torch.float64)
    expected = layer(x)
    order_N, order_P = torch.randperm(N), torch.randperm(P)
    with torch.no_grad():
        layer.router.phi.copy_(layer.router.phi[:, order_N][:, :, order_P])
        for weight in layer.experts.parameters():
            weight.copy_(weight[order_N])
    torch.testing.assert_close(layer(x), expected)


@given(SIZES, SEEDS, st.sampled_from([0.0, 0.5, -3.0, 40.0]))
def test_scale_bounds_the_logits(sizes, seed, scale):
    """Logits are cosines times the scale, so the scale alone can sharpen the routing."""
    B, M, D, N, P = sizes
    torch.manual_seed(seed)
    router = SoftRouter(D, N, P, scale_init=scale).double()
    logits = router.logits(torch.randn(B, M, D, dtype=torch.float64) * 1e3)
    assert logits.shape == (B, M, N, P)
    assert logits.abs().max() <= abs(scale)


@given(SIZES, SEEDS)
def test_gradients_are_those_of_the_function(sizes, seed):
    """Input and all parameter gradients equal finite differences."""
    B, M, D, N, P = sizes
    layer = make_layer(D, N, P, seed)
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,)).sum(0)

    x = torch.randn(B, M, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


@given(st.integers(1, 5), st.integers(1, 4), SEEDS, st.booleans())
def test_padding_changes_nothing(M, padding, seed, normalize):
    """Masked tokens, even huge ones, give nothing and receive exactly 0; the others see the truncated sequence."""
    layer = make_layer(4, 3, 2, seed, normalize=normalize)
    x = torch.randn(2, M, 4, dtype=torch.float64)
    padded = torch.cat([x, 1e30 * torch.randn(2, padding, 4, dtype=torch.float64)], dim=1).requires_grad_()
    mask = torch.arange(M + padding).expand(2, -1) < M
    y = layer(padded, mask)
    torch.testing.assert_close(y[:, :M], layer(x), rtol=1e-12, atol=1e-12)
    assert y[:, M:].abs().max() == 0
    y.square().sum().backward()
    assert padded.grad is not None
    assert padded.grad[:, M:].abs().max() == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_a_mask_may_have_holes():
    """Masked tokens in the middle leave the result of the real ones as if they were cut out."""
    layer = make_layer(4, 3, 2)
    x = torch.randn(1, 7, 4, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True, False, False, True]])
    torch.testing.assert_close(layer(x, mask)[mask], layer(x[mask][None])[0])


@pytest.mark.parametrize("kind", [SoftRouter, SoftUniformRouter, UniformSoftRouter])
def test_an_image_without_real_tokens_is_finite(kind):
    """Nothing to average gives zero weights, a zero output and finite gradients, not 0/0."""
    router = kind(4, 3, 2)
    x = torch.randn(2, 5, 4, requires_grad=True)
    mask = torch.tensor([[True] * 5, [False] * 5])
    routing = router(x, mask)
    assert routing.dispatch_weights[1].abs().max() == 0
    assert routing.combine_weights[1].abs().max() == 0
    y = routing.combine(routing.dispatch(x) + 1.0)
    assert y[1].abs().max() == 0
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_vectors_have_finite_gradients(dtype):
    """The epsilon stands inside the root: a zero token or slot vector has direction 0 and a gradient."""
    layer = SoftMoE(4, 3, 2).to(dtype)
    with torch.no_grad():
        layer.router.phi[:, 0, 0] = 0.0
    x = torch.randn(2, 5, 4, dtype=dtype)
    x[:, 1] = 0.0
    x.requires_grad_()
    assert layer.router.logits(x)[:, 1].abs().max() == 0
    layer(x).square().sum().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_epsilon_is_inside_the_root():
    """x / sqrt(|x|^2 + 1e-6), not x / (|x| + 1e-6): for short vectors the two differ much."""
    router = SoftRouter(1, 1).double()
    with torch.no_grad():
        router.phi.fill_(1.0)
    logit = router.logits(torch.full((1, 1, 1), 1e-3, dtype=torch.float64)).item()
    assert logit == pytest.approx(1e-3 / (2e-6) ** 0.5, rel=1e-5)


def test_noise_is_only_for_training_and_not_divided():
    """Logit noise has the asked deviation in training and is absent in evaluation."""
    router = SoftRouter(8, 64, 4, noise_std=0.5).double()
    x = torch.randn(4, 32, 8, dtype=torch.float64)
    clean = router.eval().logits(x)
    torch.testing.assert_close(router.logits(x), clean, rtol=0, atol=0)
    noise = router.train().logits(x) - clean
    assert noise.std().item() == pytest.approx(0.5, rel=0.02)
    assert abs(noise.mean().item()) < 0.01


def test_no_auxiliary_loss():
    """Soft routing is balanced by construction and asks for no loss."""
    routing = SoftRouter(4, 3)(torch.randn(2, 5, 4))
    assert isinstance(routing, DenseRouting)
    assert routing.auxiliary_loss.shape == ()
    assert routing.auxiliary_loss == 0


def test_start_of_phi_and_scale():
    """Slot vectors: normal of deviation 1/sqrt(D*N) cut at two sigmas; the scale starts at 1."""
    router = SoftRouter(64, 32, 8)
    sigma = (64 * 32) ** -0.5
    assert router.phi.std().item() == pytest.approx(sigma, rel=0.02)
    assert router.phi.abs().max() <= 2 * sigma / 0.8796
    assert router.scale is not None
    assert router.scale.shape == ()
    assert router.scale == 1.0
    assert SoftRouter(64, 32, 8, normalize=False).scale is None
