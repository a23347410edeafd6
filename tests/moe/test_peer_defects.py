"""What other public implementations of the layer got wrong: one test each that would have caught it."""

import math

import pytest
import torch

from softmoe import SoftMoE, create_model
from softmoe.moe import Experts, MoE, SoftRouter


def tiny(name: str = "soft_ti16_4e", **options):
    options = {"width": 16, "depth": 2, "mlp_dim": 32, "heads": 2, "num_classes": 5, "image_size": 48} | options
    return create_model(name, **options)


def test_dispatch_of_normalized_tokens():
    """Defect: the normalized copy is dispatched, so f(x) == f(10 x). The slots must mix the tokens as they came.

    With experts that pass everything on, ten times the tokens give ten times the output: the directions, and so
    the weights, stay (up to the epsilon).
    """
    layer = MoE(SoftRouter(8, 4, 2, scale_init=5.0), torch.nn.Identity()).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(10 * x), 10 * layer(x), rtol=1e-5, atol=1e-5)
    real = SoftMoE(8, 4, 2).double()
    assert (real(10 * x) - real(x)).abs().max() > 0.1


def test_near_hard_routing_at_the_start():
    """Defect: both sides normalized to length sqrt(D) and no scale: logits of deviation sqrt(D), weights of 0.9.

    At S/16 size the start must be near uniform: 1/196 for each token, 1/64 for each slot.
    """
    router = SoftRouter(384, 64)
    routing = router(torch.randn(2, 196, 384))
    assert router.logits(torch.randn(2, 196, 384)).std() < 2 / math.sqrt(384)
    assert routing.dispatch_weights.max() < 1.5 / 196
    assert routing.combine_weights.max() < 1.5 / 64


def test_missing_normalization():
    """Defect: no normalization, so long tokens saturate the softmax (the paper's collapse)."""
    x = 100 * torch.randn(2, 20, 64)
    assert SoftRouter(64, 16)(x).dispatch_weights.max() < 2 / 20
    assert SoftRouter(64, 16, normalize=False)(x).dispatch_weights.max() > 0.9


@pytest.mark.parametrize("N", [1, 8, 64])
def test_wrong_fan_of_stacked_weights(N):
    """Defect: an initializer reads its fan from the (N, D, H) tensor; weights come out 16 times too small.

    The deviation of every expert must be that of one dense MLP, however many there are.
    """
    D, H = 48, 96
    experts = Experts(D, H, N)
    expected = math.sqrt(2 / (D + H))
    for weight in (experts.w1, experts.w2):
        std_N = weight.flatten(1).std(dim=1)
        assert ((std_N / expected - 1).abs() < 0.06).all()
        assert weight.abs().max() <= math.sqrt(6 / (D + H))
    assert experts.b1.abs().max() < 1e-5
    assert experts.b2.abs().max() < 1e-5


def test_outputs_at_the_start_have_the_size_of_an_mlp():
    """The same defect seen from outside: rows of unit variance come out near those of a dense MLP."""
    x = torch.randn(4, 200, 64)
    std = Experts(64, 256, 4)(x).std(dim=(1, 2))
    assert (std > 0.3).all()
    assert (std < 1.0).all()


def test_softmax_over_the_batch():
    """Defect: the dispatch softmax ran over the batch axis. Images must not see each other."""
    layer = SoftMoE(8, 4, 2)
    x = torch.randn(3, 6, 8)
    alone = layer(x[:1])
    torch.testing.assert_close(layer(x)[:1], alone)
    routing = layer.router(x)
    torch.testing.assert_close(routing.dispatch_weights.sum(1), torch.ones(3, 4, 2))


def test_swapped_or_doubled_softmax():
    """Defects: dispatch and combine axes swapped; combine = softmax of a softmax.

    One slot near one token: its dispatch goes to that token, and that token reads mostly that slot.
    """
    router = SoftRouter(4, 4, scale_init=30.0)
    with torch.no_grad():
        router.phi.copy_(torch.eye(4).unsqueeze(-1))
    x = torch.eye(4)[None, :3] * torch.tensor([1.0, 2.0, 3.0])[:, None]
    routing = router(x)
    torch.testing.assert_close(routing.dispatch_weights[0, :, :3, 0], torch.eye(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(routing.dispatch_weights[0, :, 3, 0], torch.full((3,), 1 / 3))
    torch.testing.assert_close(routing.combine_weights[0, :, :, 0], torch.eye(4)[:3], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["vit_ti16", "soft_ti16_4e", "identity_ti16_4e"])
def test_attention_across_the_batch(name):
    """Defect: the dense baseline attended over the batch axis. Another image in the batch must change nothing."""
    model = tiny(name).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(3, 3, 48, 48)
    changed = images.clone()
    changed[1] = torch.randn(3, 48, 48)
    before, after = model(images), model(changed)
    torch.testing.assert_close(before[[0, 2]], after[[0, 2]])
    assert (before[1] - after[1]).abs().max() > 1e-3


def test_zero_slots():
    """Defect: more experts than tokens gave no slot, and silently a zero output."""
    layer = SoftMoE(8, 64)
    assert layer.router(torch.randn(1, 3, 8)).dispatch_weights.shape == (1, 3, 64, 1)
    assert layer(torch.randn(1, 3, 8)).abs().min() > 0


@pytest.mark.parametrize("tokens", [1, 9, 100])
def test_slots_need_not_match_tokens(tokens):
    """A question of users: nine slots for any number of tokens."""
    assert SoftMoE(8, 3, 3)(torch.randn(2, tokens, 8)).shape == (2, tokens, 8)


def test_an_expert_is_a_whole_mlp():
    """Defect: only the second linear was an expert, in all blocks. Here both are, in the second half."""
    model = tiny(depth=4)
    kinds = [type(block.mlp).__name__ for block in model.encoder.blocks]
    assert kinds == ["MLP", "MLP", "MoE", "MoE"]
    experts = model.encoder.blocks[3].mlp.experts
    assert experts.w1.shape == (4, 16, 32)
    assert experts.w2.shape == (4, 16, 32)


def test_loop_over_experts():
    """Defect: a python loop over experts; the graph, and the time to launch it, grew with their number."""

    def nodes(N: int) -> int:
        program = torch.export.export(SoftMoE(8, N, 2).eval(), (torch.randn(2, 6, 8),))
        return len(program.graph.nodes)

    assert nodes(2) == nodes(32) < 80


def test_dropout_of_zero_is_zero():
    """Defect: dropout 0.1 although 0.0 was asked. In training mode two passes must agree to the bit."""
    model = tiny(dropout=0.0).train()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 48, 48)
    assert torch.equal(model(images), model(images))
    noisy = tiny(dropout=0.5).train()
    torch.nn.init.normal_(noisy.head.weight)
    assert not torch.equal(noisy(images), noisy(images))


def test_blocks_are_pre_norm():
    """Defect: post-norm blocks. With silent branches a pre-norm block is the identity."""
    block = tiny("vit_ti16").encoder.blocks[0]
    for linear in (block.attention.out, block.mlp.fc2):
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    x = torch.randn(2, 5, 16)
    assert torch.equal(block(x), x)


def test_causal_use_is_refused():
    """Defect: a decoder with Soft MoE that leaks future tokens. Asked for a causal use, it says why not."""
    layer = SoftMoE(8, 4)
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="cannot be causal: every slot averages all tokens"):
        layer(x, is_causal=True)
    with pytest.raises(ValueError, match="causal ones among them"):
        layer(x, torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 5, 5))
    changed = x.clone()
    changed[:, -1] = 7.0  # the leak itself: the first output depends on the last token
    assert not torch.equal(layer(x)[:, 0], layer(changed)[:, 0])


@pytest.mark.parametrize("pool", ["mean", "class", "attention"])
def test_change_of_resolution(pool):
    """Defect: an assertion at any other image size. Slots are fixed numbers, positions are resampled."""
    model = tiny(pool=pool).eval()
    for size in ((48, 48), (96, 96), (32, 80), (17, 16)):
        assert model(torch.randn(1, 3, *size)).shape == (1, 5)


def test_parameters_do_not_depend_on_resolution():
    """Defect: slots from a capacity factor, so that a checkpoint fits one image size only (positions aside)."""
    small, large = tiny(image_size=32).state_dict(), tiny(image_size=96).state_dict()
    differing = [name for name in small if small[name].shape != large[name].shape]
    assert differing == ["positions.table"]


def test_every_parameter_gets_a_gradient_at_every_step():
    """Defect: parameters left without gradient end data-parallel training at its second step."""
    model = tiny(pool="attention").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 48, 48)).square().sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
        optimizer.step()


def test_tokens_are_not_rounded():
    """The reference rounds tokens and expert outputs to bfloat16 always. A float32 layer must keep its digits."""
    layer = SoftMoE(16, 4, 2)
    x = torch.randn(2, 6, 16)
    y = layer(x)
    torch.testing.assert_close(y.double(), layer.double()(x.double()), rtol=1e-4, atol=1e-6)


def test_forward_does_not_move_weights():
    """Defect: `.to(device)` of every expert in each forward, which export refuses and which hides a wrong place."""
    layer = SoftMoE(8, 4)
    pointers = [parameter.data_ptr() for parameter in layer.parameters()]
    layer(torch.randn(1, 3, 8))
    assert [parameter.data_ptr() for parameter in layer.parameters()] == pointers
