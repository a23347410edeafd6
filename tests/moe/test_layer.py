"""What every MoE layer promises, whichever router fills the experts."""

import copy

import pytest
import torch

from softmoe import SoftMoE
from softmoe.machine import bfloat16_works
from softmoe.moe import (
    DenseRouting,
    Experts,
    ExpertsChoiceRouter,
    IdentityRouter,
    MoE,
    PlacedRouter,
    Router,
    SoftRouter,
    SoftUniformRouter,
    SparseRouting,
    TokensChoiceRouter,
    UniformRouter,
    UniformSoftRouter,
)
from softmoe.moe.record import record

ROUTERS = [
    SoftRouter,
    SoftUniformRouter,
    UniformSoftRouter,
    UniformRouter,
    IdentityRouter,
    TokensChoiceRouter,
    ExpertsChoiceRouter,
]
every_router = pytest.mark.parametrize("kind", ROUTERS)


def make_layer(kind: type[Router], D: int = 8, N: int = 4) -> MoE:
    return MoE(kind(D, N), Experts(D, 16, N))


@every_router
def test_shapes_and_gradients(kind):
    """(B, M, D) in and out; every parameter learns."""
    layer = make_layer(kind)
    x = torch.randn(3, 6, 8, requires_grad=True)
    y = layer(x)
    routing = layer.router(x)
    assert y.shape == x.shape
    assert routing.dispatch(x).shape[0] == 4
    assert routing.dispatch(x).shape[2] == 8
    (y.square().sum() + routing.auxiliary_loss).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@every_router
def test_the_layer_is_router_dispatch_experts_combine(kind):
    """A routing moves rows and knows nothing of experts: the four steps by hand give the layer."""
    layer = make_layer(kind).double().eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    routing = layer.router(x)
    assert torch.equal(layer(x), routing.combine(layer.experts(routing.dispatch(x))))


@every_router
def test_weights_say_what_dispatch_and_combine_do(kind):
    """The weights or assignments that plots and losses read are the ones that move the rows."""
    router = kind(3, 4).double().eval()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    routing = router(x)
    slots = routing.dispatch(x)
    outputs = torch.randn_like(slots)
    if isinstance(routing, DenseRouting):
        expected_slots = torch.einsum("bmnp,bmd->nbpd", routing.dispatch_weights, x).flatten(1, 2)
        shaped = outputs.unflatten(1, (2, -1))
        expected = torch.einsum("bmnp,nbpd->bmd", routing.combine_weights, shaped)
    else:
        assert isinstance(routing, SparseRouting)
        rows = torch.cat([x.flatten(0, 1), torch.zeros(1, 3, dtype=x.dtype)])
        expected_slots = rows[routing.token_of_slot_NS]
        expected = torch.zeros(11, 3, dtype=x.dtype)
        for token, gate, row in zip(
            routing.token_of_slot_NS.flatten(), routing.gate_NS.flatten(), outputs.flatten(0, 1), strict=True
        ):
            expected[token] += gate * row
        expected = expected[:10].view(2, 5, 3)
    torch.testing.assert_close(slots, expected_slots)
    torch.testing.assert_close(routing.combine(outputs), expected)


@every_router
def test_masked_tokens_receive_exactly_zero_and_give_nothing(kind):
    """Changing what stands at masked places changes no real output."""
    layer = make_layer(kind).eval()
    x = torch.randn(2, 6, 8)
    mask = torch.tensor([[True] * 4 + [False] * 2, [True, False] * 3])
    y = layer(x, mask)
    changed = torch.where(mask[..., None], x, 1e10 * torch.randn_like(x))
    assert y[~mask].abs().max() == 0
    torch.testing.assert_close(layer(changed, mask), y)


@pytest.mark.parametrize("kind", [*ROUTERS, PlacedRouter])
@pytest.mark.parametrize("padding", [torch.nan, torch.inf])
def test_padding_may_hold_anything(kind, padding):
    """NaN and infinity at masked places reach no output, no loss and no gradient."""
    layer = make_layer(kind)  # in training, where there are losses; the noise is drawn alike
    mask = torch.tensor([[True] * 4 + [False] * 2, [True, False] * 3])
    x = torch.where(mask[..., None], torch.randn(2, 6, 8), 0.0)
    results = []
    for filled in (x, torch.where(mask[..., None], x, padding)):
        torch.manual_seed(0)
        tokens = filled.requires_grad_()
        with record(layer) as recording:
            y = layer(tokens, mask, (2, 3))
        loss = recording.routings["moe"].auxiliary_loss
        gradients = torch.autograd.grad(y.square().sum() + loss, [tokens, *layer.parameters()])
        results.append([y, loss, *gradients])
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@every_router
def test_no_mask_is_a_mask_of_ones(kind):
    """All real is the same as no mask."""
    layer = make_layer(kind).eval()
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(layer(x, torch.ones(2, 6, dtype=torch.bool)), layer(x))


@every_router
def test_one_token_one_expert_is_an_mlp(kind):
    """With nothing to mix or to choose, every router gives the expert itself."""
    layer = make_layer(kind, N=1).eval()
    x = torch.randn(3, 1, 8)
    torch.testing.assert_close(layer(x), layer.experts(x.transpose(0, 1)).transpose(0, 1))


@every_router
def test_an_empty_batch_gives_an_empty_output(kind):
    """The last shard of an evaluation may hold no image."""
    layer = make_layer(kind).eval()
    assert layer(torch.randn(0, 6, 8)).shape == (0, 6, 8)


@every_router
def test_copies_and_state(kind):
    """deepcopy is independent and equal; a state dict fills another layer to the last bit."""
    layer = make_layer(kind).eval()
    x = torch.randn(2, 6, 8)
    y = layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), y)
    other = make_layer(kind).eval()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y)
    with torch.no_grad():
        twin.experts.w1.zero_()
    assert torch.equal(layer(x), y)


@every_router
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts(kind, dtype):
    """A cast layer computes in its dtype, near the float32 result, and routes in float32 at least."""
    if dtype == torch.bfloat16 and not bfloat16_works():
        pytest.skip("this machine's bfloat16 products crash")
    layer = make_layer(kind).eval()
    x = torch.randn(2, 6, 8)
    cast = copy.deepcopy(layer).to(dtype)
    y = cast(x.to(dtype))
    routing = cast.router(x.to(dtype))
    weights = routing.dispatch_weights if isinstance(routing, DenseRouting) else routing.gate_NS
    assert y.dtype == dtype
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float16: 0.01, torch.bfloat16: 0.05, torch.float64: 1e-5}[dtype]
    torch.testing.assert_close(y.float(), layer(x), rtol=tolerance, atol=tolerance)


@every_router
def test_autocast_keeps_the_router_in_float32(kind):
    """Under bfloat16 autocast the experts run low, routing weights equal those without autocast."""
    if not bfloat16_works():
        pytest.skip("this machine's bfloat16 products crash")
    layer = make_layer(kind).eval()
    x = torch.randn(2, 6, 8)
    plain = layer.router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = layer.router(x)
        y = layer(x)
    name = "combine_weights" if isinstance(plain, DenseRouting) else "gate_NS"
    assert getattr(routing, name).dtype == torch.float32
    torch.testing.assert_close(getattr(routing, name), getattr(plain, name))
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.05)


def test_soft_layer_takes_vectors_and_feature_maps():
    """(B, D) is one token; (B, D, height, width) has height x width tokens, in any memory format."""
    layer = SoftMoE(8, 3, 2).double()
    tokens = torch.randn(2, 12, 8, dtype=torch.float64)
    expected = layer(tokens)
    image = tokens.transpose(1, 2).reshape(2, 8, 3, 4)
    for memory in (torch.contiguous_format, torch.channels_last):
        y = layer(image.contiguous(memory_format=memory))
        torch.testing.assert_close(y.flatten(2).transpose(1, 2), expected)
    torch.testing.assert_close(layer(tokens[:, 0]), layer(tokens[:, :1])[:, 0])


def test_hidden_width_is_four_times_the_width_by_default():
    """As the MLP whose place the layer takes."""
    assert SoftMoE(8, 3).experts.hidden_dim == 32
    assert SoftMoE(8, 3, hidden_dim=5).experts.hidden_dim == 5


def test_own_experts_may_take_the_place_of_ours():
    """Any module (N, S, D) -> (N, S, D) works as experts."""
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(MoE(IdentityRouter(4, 2), torch.nn.Identity())(x), x)
