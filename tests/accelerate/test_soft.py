"""Soft routing that keeps its logits alone, against the plain router."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

import softmoe
from softmoe import accelerate
from softmoe.accelerate.soft import LogitsRouting, keep_logits_only
from softmoe.moe import PlacedRouter, SoftRouter


def bytes_kept(call: Callable[[], object], but: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd keeps for the backward pass of what is called, each memory counted once, but for some."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        output = call()
    del output
    known = {tensor.untyped_storage().data_ptr() for tensor in but}
    return sum(size for place, (size, _) in kept.items() if place not in known)


def outputs_and_gradients(layer: softmoe.SoftMoE, x: Tensor, mask: Tensor | None) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x, mask)
    wanted = [x, *layer.parameters()]
    return [y, *torch.autograd.grad(y.pow(3).sum(), wanted)]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (3, 7, 5, 4, 2), (2, 9, 6, 5, 1)])
def test_numbers_are_the_plain_ones(sizes: tuple[int, ...], masked: bool, normalize: bool) -> None:
    """Outputs and all gradients in float64, with an image that has no real token."""
    B, M, D, N, P = sizes
    layer = softmoe.SoftMoE(D, N, P, 7, normalize=normalize, scale_init=3.0).double()
    x, mask = torch.randn(B, M, D).double(), None
    if masked:
        mask = torch.rand(B, M) < 0.6
        mask[0] = False
    plain = outputs_and_gradients(layer, x, mask)
    assert keep_logits_only(layer) == 1
    assert isinstance(layer.router(x, mask), LogitsRouting)
    for one, other in zip(outputs_and_gradients(layer, x, mask), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    accelerate.remove(layer)
    assert type(layer.router) is SoftRouter


@pytest.mark.parametrize("combine_place", [True, False])
def test_places_and_weights(combine_place: bool) -> None:
    """A router with places keeps them, and whoever looks at the weights sees the plain ones."""
    router = PlacedRouter(8, 4, frame=True, combine_place=combine_place).double()
    x = torch.randn(2, 9, 8).double()
    torch.nn.init.normal_(router.frame.direction)
    plain = router(x, None, (3, 3))
    keep_logits_only(router)
    found = router(x, None, (3, 3))
    torch.testing.assert_close(found.dispatch_weights, plain.dispatch_weights)
    torch.testing.assert_close(found.combine_weights, plain.combine_weights)
    torch.testing.assert_close(found.dispatch(x), plain.dispatch(x))
    slots = torch.randn(4, 2, 8).double()
    torch.testing.assert_close(found.combine(slots), plain.combine(slots))


def test_gradients_of_gradients() -> None:
    """The backward pass can itself be differentiated."""
    layer, x = softmoe.SoftMoE(4, 3, 1, 5).double(), torch.randn(1, 3, 4).double().requires_grad_()
    keep_logits_only(layer)
    torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize("autocast", [False, True])
def test_less_is_kept(autocast: bool) -> None:
    """At the shape of S/16 with 128 experts at most two thirds of what the plain router keeps, weights apart."""
    router, x = SoftRouter(384, 128), torch.randn(2, 196, 384, requires_grad=True)

    def there_and_back() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            routing = router(x)
            return routing.combine(routing.dispatch(x) * 2)

    plain, right = bytes_kept(there_and_back, router.parameters()), there_and_back()
    keep_logits_only(router)
    assert bytes_kept(there_and_back, router.parameters()) < plain * 2 / 3
    found = there_and_back()
    assert found.dtype == right.dtype
    torch.testing.assert_close(found, right)
