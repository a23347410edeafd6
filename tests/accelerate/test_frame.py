"""The compiled frame of a placed router against the plain one in float64."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transforms import TRANSFORMS

from softmoe.accelerate import frame as module
from softmoe.accelerate.soft import keep_logits_only
from softmoe.moe import MoE, PlacedRouter

needs_compiler = pytest.mark.skipif(not module.KERNEL.available, reason=f"not compiled: {module.KERNEL.why_not()}")
BOTH = ["_forward", "_backward"]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled passes that are called from now on."""
    calls: list[str] = []
    for name in BOTH:
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, f=plain, n=name: (calls.append(n), f(*args))[1])
    return calls


def router(dim: int = 6, experts: int = 4, slots: int = 1, **options) -> PlacedRouter:
    """A placed router whose frame, centers and widths are no longer those of the start."""
    torch.manual_seed(0)
    made = PlacedRouter(dim, experts, slots, **{"frame": True, "scale_init": 3.0, "place_init": 2.0} | options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    if made.frame is not None:
        module.switch_on(made)
    return made


def weights_and_gradients(of: PlacedRouter, x: Tensor, grid: tuple[int, int], mask: Tensor | None = None):
    x = x.clone().requires_grad_()
    routing = of(x, mask, grid)
    weights = routing.dispatch_weights, routing.combine_weights
    upstream = [torch.randn(w.shape, generator=torch.Generator().manual_seed(1)).to(w) for w in weights]
    return [*weights, *torch.autograd.grad(weights, (x, *of.parameters()), upstream)]


def check(found: list[Tensor], exact: list[Tensor]) -> None:
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * max(1.0, other.abs().max().item()))


@needs_compiler
@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (4, 4), (9, 7)])
@pytest.mark.parametrize("combine_place", [True, False])
@pytest.mark.parametrize(("dim", "experts", "slots"), [(6, 4, 1), (24, 16, 1), (33, 3, 7), (16, 1, 2)])
def test_weights_and_gradients(
    passes: list[str], grid: tuple[int, int], dim: int, experts: int, slots: int, combine_place: bool
) -> None:
    """Any number of tokens, any width and any number of slots, so any rest of a vector; all gradients."""
    of = router(dim, experts, slots, combine_place=combine_place)
    x = torch.randn(3, grid[0] * grid[1], dim)
    found = weights_and_gradients(of, x, grid)
    assert passes == BOTH
    exact = weights_and_gradients(copy.deepcopy(of).double(), x.double(), grid)
    assert passes == BOTH, "float64 is not for the compiled pass"
    check(found, exact)


@needs_compiler
def test_the_number_of_threads_changes_no_bit(passes: list[str]) -> None:
    of, x = router(), torch.randn(5, 12, 6)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(weights_and_gradients(of, x, (3, 4)))
    torch.set_num_threads(1)
    assert passes == 3 * BOTH
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


@needs_compiler
def test_tokens_of_another_layout(passes: list[str]) -> None:
    """Tokens that are a transposed view, as those of a feature map, give what contiguous ones give."""
    of, x = router(), torch.randn(2, 6, 12)
    found = weights_and_gradients(of, x.mT, (3, 4))
    assert passes == BOTH
    again = weights_and_gradients(of, x.mT.contiguous(), (3, 4))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@needs_compiler
def test_what_is_not_finite_stays_so(passes: list[str]) -> None:
    """One NaN makes all of its own image NaN and nothing of another's; large tokens have a frame too."""
    of, x = router(), torch.randn(2, 12, 6) * 1e15
    x[0, 3, 2] = torch.nan
    dispatch = of(x, None, (3, 4)).dispatch_weights
    assert passes == ["_forward"]
    assert dispatch[0].isnan().all()
    torch.testing.assert_close(dispatch[1].sum(0), torch.ones(4, 1))


@needs_compiler
def test_frozen_parameters(passes: list[str]) -> None:
    of = router()
    assert of.frame is not None
    of.frame.requires_grad_(False)
    of.place.center.requires_grad_(False)
    of(torch.randn(2, 12, 6), None, (3, 4)).dispatch_weights.square().sum().backward()
    assert passes == BOTH
    assert of.frame.direction.grad is None
    assert of.place.center.grad is None
    assert of.place.log_width.grad is not None


@needs_compiler
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_what_they_can_derive(passes: list[str], transform: Callable[..., Tensor]) -> None:
    """Second derivatives, transforms and forward mode are those of torch."""
    of, x = router(), torch.randn(3, 12, 6)

    def function(of: PlacedRouter) -> Callable[[Tensor], Tensor]:
        return lambda x: of(x, None, (3, 4)).dispatch_weights.pow(2).sum()

    found = transform(function(of), x.clone())
    exact = transform(function(copy.deepcopy(of).double()), x.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_whoever_listens_is_heard(passes: list[str]) -> None:
    """Hooks, masks, tokens without a place, places without a frame, autocast, whoever counts operations."""
    x, heard = torch.randn(1, 12, 6), []
    for name in ("frame", "place"):
        of = router()
        of.get_submodule(name).register_forward_hook(lambda *args: heard.append(args[2].shape))
        of(x, None, (3, 4))
    assert heard == [(1, 12, 2), (1, 12, 4, 1)]
    router()(x, torch.ones(1, 12, dtype=torch.bool), (3, 4))
    router()(x, None, (1, 11))
    router(frame=False)(x, None, (3, 4))
    router()(x)
    with torch.autocast("cpu", torch.float16):
        router()(x, None, (3, 4))
    with FlopCounterMode(display=False):
        router()(x, None, (3, 4))
    assert passes == []


@needs_compiler
def test_with_logits_kept_alone(passes: list[str]) -> None:
    """A router that keeps only its logits for the backward pass has the same gradients, by the compiled frame too."""
    x = torch.randn(2, 12, 6)
    layer = MoE(router(), nn.Identity())
    other = copy.deepcopy(layer)
    assert keep_logits_only(other) == 1
    results = []
    for one in (layer, other):
        y = one(x, None, (3, 4))
        results.append([y, *torch.autograd.grad(y.pow(3).sum(), list(one.parameters()))])
    assert passes == 2 * BOTH
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_off_where_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a frame, and a machine without a compiler, are told of, and the plain router computes."""
    if module.KERNEL.available:
        with pytest.raises(module.Off, match="no router with a frame"):
            module.switch_on(PlacedRouter(6, 4))
    of, x = PlacedRouter(6, 4, frame=True), torch.randn(2, 12, 6)
    expected = of(x, None, (3, 4)).dispatch_weights
    monkeypatch.setattr(module.KERNEL, "_found", "no compiler")
    with pytest.raises(module.Off, match="no compiler"):
        module.switch_on(of)
    of.__class__ = module.CompiledPlacedRouter
    assert torch.equal(of(x, None, (3, 4)).dispatch_weights, expected)
