"""Soft routing with a place, against plain loops, and what the place must and must not do."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmoe.models import create_model
from softmoe.moe import Experts, MoE, PlacedConfig, PlacedRouter, SoftRouter
from softmoe.moe.placed import even_grid, grid_places

SIZES = st.tuples(*[st.integers(1, high) for high in (2, 4, 4, 3, 4, 3)])  # B, rows, columns, D, N, P


def make_layer(D: int, N: int, P: int, seed: int = 0, frame: bool = False, combine_place: bool = True) -> MoE:
    """A float64 layer away from its start: sharp logits, moved centers, different widths, a frame that singles out."""
    torch.manual_seed(seed)
    router = PlacedRouter(D, N, P, scale_init=3.7, frame=frame, combine_place=combine_place)
    layer = MoE(router, Experts(D, 2 * D, N)).double()
    with torch.no_grad():
        if frame:
            layer.router.frame.direction.normal_()
        layer.router.place.center.add_(0.2 * torch.randn_like(layer.router.place.center))
        layer.router.place.log_width.add_(0.3 * torch.randn_like(layer.router.place.log_width))
        layer.experts.b1.normal_()
    return layer


@given(SIZES, st.integers(0, 2), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_output_equals_the_plain_loops(sizes, prefix, masked, frame, combine_place, seed):
    """Distance over width, squared, is taken from the logits, or from dispatch's; tokens without a place come first."""
    B, rows, columns, D, N, P = sizes
    layer, M = make_layer(D, N, P, seed, frame, combine_place), prefix + rows * columns
    x = torch.randn(B, M, D, dtype=torch.float64)
    mask = torch.rand(B, M) < 0.7 if masked else None
    router = layer.router
    logits = oracle.soft_logits(x.numpy(), router.phi.detach().numpy(), router.scale.item())
    center, width = router.place.center.detach().numpy(), router.place.log_width.detach().exp().numpy()
    real = None if mask is None else mask.numpy()
    if frame:
        direction = router.frame.direction.detach().numpy()
        seen = x.numpy()[:, prefix:] if real is None else np.where(real[..., None], x.numpy(), 0.0)[:, prefix:]
        places = oracle.frame_places(seen, direction, rows, columns, None if real is None else real[:, prefix:])
    else:
        places = np.stack([oracle.grid_places(rows, columns)] * B)
    placed = logits + np.stack([oracle.place_bias(center, width, one, prefix) for one in places])
    dispatch = oracle.dispatch_weights(placed, real)
    combine = oracle.combine_weights(placed if combine_place else logits, real)
    expected = oracle.dense_layer(x.numpy(), dispatch, combine, oracle.ExpertWeights.of(layer.experts))
    found = layer(x, mask, (rows, columns)).detach().numpy()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_without_a_grid_it_is_the_soft_router():
    """Text has no place: exactly the paper's weights."""
    torch.manual_seed(0)
    placed, x = PlacedRouter(8, 4, 2), torch.randn(2, 6, 8)
    soft = SoftRouter(8, 4, 2)
    soft.load_state_dict(placed.state_dict(), strict=False)
    assert torch.equal(placed(x).dispatch_weights, soft(x).dispatch_weights)
    assert torch.equal(placed(x).combine_weights, soft(x).combine_weights)
    assert not torch.equal(placed(x, None, (2, 3)).dispatch_weights, soft(x).dispatch_weights)


@pytest.mark.parametrize(("frame", "combine_place"), [(False, True), (True, True), (True, False)])
def test_gradients_are_those_of_finite_differences(frame, combine_place):
    """Tokens, slot vectors, centers, widths and frame all learn, with a token that has no place among them."""
    layer = make_layer(4, 2, 2, frame=frame, combine_place=combine_place)
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.router.named_parameters()]
    assert names == ["phi", "scale", "place.center", "place.log_width", *["frame.direction"] * frame]

    def output(x, *values):
        moved = dict(zip([f"router.{name}" for name in names], values, strict=True))
        return torch.func.functional_call(layer, moved, (x, None, (2, 3)))

    values = [p.detach().clone().requires_grad_() for p in layer.router.parameters()]
    assert torch.autograd.gradcheck(output, (x, *values))


def test_a_place_for_dispatch_alone():
    """Slots take tokens as with a place, and give their outputs back as the paper's layer does."""
    torch.manual_seed(0)
    router, x = PlacedRouter(8, 4, 2, frame=True, combine_place=False), torch.randn(2, 7, 8)
    torch.nn.init.normal_(router.frame.direction)
    placed, soft = PlacedRouter(8, 4, 2, frame=True), SoftRouter(8, 4, 2)
    placed.load_state_dict(router.state_dict())
    soft.load_state_dict(router.state_dict(), strict=False)
    found = router(x, None, (2, 3))
    assert torch.equal(found.dispatch_weights, placed(x, None, (2, 3)).dispatch_weights)
    assert torch.equal(found.combine_weights, soft(x).combine_weights)


def test_the_start_is_an_even_grid():
    """Each of 16 slots leans to its own of 16 cells, and its logit has fallen by `place_init` at the next one."""
    router = PlacedConfig(num_experts=8, slots_per_expert=2, place_init=4.0).build(5)
    assert isinstance(router, PlacedRouter)
    bias_MS = router.place(*grid_places((4, 4), torch.empty(1, 16, 5))).flatten(1)
    assert torch.equal(bias_MS.argmax(0), torch.arange(16))
    torch.testing.assert_close(bias_MS[0, :2], torch.tensor([0.0, -4.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(bias_MS[4, 0], torch.tensor(-4.0))


def test_places_are_computed_in_float32_at_least():
    """A model in half precision has the logits of its own parameters, as the Soft router's are."""
    half = PlacedRouter(8, 4, 4).bfloat16()
    wide = PlacedRouter(8, 4, 4)
    wide.load_state_dict(half.state_dict())
    x = torch.randn(2, 196, 8, dtype=torch.bfloat16)
    places = grid_places((14, 14), torch.empty(1, 197, 8))
    assert torch.equal(half.place(*places), wide.place(*places))
    found, expected = half(x, None, (14, 14)), wide(x.float(), None, (14, 14))
    assert torch.equal(found.dispatch_weights, expected.dispatch_weights)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 36, 50, 64])
def test_centers_cover_the_square(count):
    """Any number of slots: all different, all inside, with the middle of the picture as their mean."""
    points = even_grid(count)
    assert len(set(points)) == len(points) == count
    assert all(0 < y < 1 and 0 < x < 1 for y, x in points)
    assert abs(sum(x for _, x in points) / count - 0.5) < 1e-9


def test_a_token_without_a_place_counts_as_the_average():
    """Where content says nothing, a class token has one share of M + 1 in every slot, whatever the place."""
    router = PlacedRouter(4, 3, 2)
    with torch.no_grad():
        router.phi.zero_()
    routing = router(torch.randn(2, 10, 4), None, (3, 3))
    torch.testing.assert_close(routing.dispatch_weights[:, 0], torch.full((2, 3, 2), 0.1))


def test_content_can_win():
    """A slot whose vector is a far token's direction takes that token once the scale is large enough."""
    router = PlacedRouter(16, 16, scale_init=400.0)
    x = torch.randn(1, 16, 16)
    with torch.no_grad():
        router.phi[:, 0, 0] = x[0, 15]  # slot 0 has its center at cell 0
    assert router(x, None, (4, 4)).dispatch_weights[0, :, 0, 0].argmax() == 15


def test_another_image_size_asks_the_same_places():
    """On a grid of twice the cells a slot's weights, summed over the cells of each old one, are nearly the old ones."""
    router = PlacedRouter(8, 16).double()
    same = torch.randn(1, 1, 8, dtype=torch.float64)
    small = router(same.expand(1, 256, 8), None, (16, 16)).dispatch_weights[0, :, :, 0]
    large = router(same.expand(1, 1024, 8), None, (32, 32)).dispatch_weights[0, :, :, 0]
    pooled = large.view(16, 2, 16, 2, 16).sum((1, 3)).view(256, 16)
    torch.testing.assert_close(pooled, small, atol=2e-3, rtol=0)


def test_a_frame_starts_as_the_image():
    """At the start, and in an image of one color for ever, places in the frame are places in the image."""
    torch.manual_seed(0)
    framed, x = PlacedRouter(8, 4, 4, frame=True).double(), torch.randn(2, 17, 8, dtype=torch.float64)
    plain = PlacedRouter(8, 4, 4).double()
    plain.load_state_dict(framed.state_dict(), strict=False)

    def weights(router: PlacedRouter, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = router(tokens, None, (4, 4))
        return routing.dispatch_weights, routing.combine_weights

    torch.testing.assert_close(weights(framed, x), weights(plain, x), rtol=1e-12, atol=1e-12)
    torch.nn.init.normal_(framed.frame.direction)
    assert not torch.allclose(weights(framed, x)[0], weights(plain, x)[0])
    same = x[:, :1].expand(2, 16, 8)
    torch.testing.assert_close(weights(framed, same), weights(plain, same), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, of dynamo
def test_a_frame_compiles_without_a_graph_break():
    """torch.compile(fullgraph=True) gives eager's output and gradients of a layer with a frame, masked tokens too."""
    torch.compiler.reset()
    layer, x = make_layer(4, 2, 2, frame=True), torch.randn(2, 7, 4, dtype=torch.float64)
    compiled, mask = torch.compile(layer, fullgraph=True, backend="aot_eager"), torch.rand(2, 7) < 0.7
    expected, found = layer(x, mask, (2, 3)), compiled(x, mask, (2, 3))
    torch.testing.assert_close(found, expected)
    parameters = list(layer.parameters())
    ours = torch.autograd.grad(found.square().sum(), parameters)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), parameters))


def test_slots_follow_what_the_frame_finds():
    """Each slot takes the same part of an object that stands elsewhere, or is twice as large."""
    router = PlacedRouter(2, 16, scale_init=0.0, frame=True).double()
    with torch.no_grad():
        router.frame.direction.copy_(torch.tensor([20.0, 0.0]))  # ink is along the first axis, paper along the second

    def parts(top: int, left: int, size: int) -> list[int]:
        """The part of the object, one of 4 x 4, that each slot takes most of; -1 for paper."""
        part_of_cell = torch.full((12, 12), -1)
        drawn = torch.arange(16).view(4, 4).repeat_interleave(size, 0).repeat_interleave(size, 1)
        part_of_cell[top : top + 4 * size, left : left + 4 * size] = drawn
        x = torch.where(part_of_cell.view(1, 144, 1) < 0, torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])).double()
        return part_of_cell.flatten()[router(x, None, (12, 12)).dispatch_weights.argmax(1)].flatten().tolist()

    assert parts(2, 3, 1) == parts(7, 6, 1) == parts(2, 3, 2) == list(range(16))
    router.frame.reset_parameters()
    assert parts(2, 3, 1) != list(range(16))


@pytest.mark.parametrize("pool", ["mean", "class"])
def test_models_hand_the_grid_over(pool):
    """In a vision transformer the place counts, at any image size, wide or high, with gradient checkpointing too."""
    options = {"image_size": 32, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "num_classes": 3, "pool": pool}
    model = create_model("placed_ti8_4e", **options).double()
    torch.nn.init.normal_(model.head.weight)
    for shape in ((32, 32), (64, 32), (16, 48)):
        images = torch.randn(2, 3, *shape, dtype=torch.float64)
        logits = model(images)
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)
        found = dict(zip([name for name, _ in model.named_parameters()], gradients, strict=True))
        for name in ("center", "log_width"):
            assert found[f"encoder.blocks.1.mlp.router.place.{name}"].abs().sum() > 0
        model.set_grad_checkpointing()
        torch.testing.assert_close(model.train()(images), logits)
        model.set_grad_checkpointing(False)


def test_wrong_grids_and_strengths_are_told():
    """More cells than tokens, and a start without a lean, are one sentence each."""
    with pytest.raises(ValueError, match="a grid of 3 x 3 has 9 cells, but there are 8 tokens"):
        PlacedRouter(4, 2)(torch.randn(1, 8, 4), None, (3, 3))
    with pytest.raises(ValueError, match="place_init must be above 0"):
        PlacedRouter(4, 2, place_init=0.0)
