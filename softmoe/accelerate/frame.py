"""The frame of a placed router, and the places of its slots in it, by frame.cpp, on a CPU: one pass instead of thirty.

The case: the recipes `quickstart` and `moving`, models so small that thirty calls of torch are a tenth of a step; with
larger ones torch writes and reads an array of (B, M, S, 2) numbers.

Letters: B images, M tokens, D width, N experts, P slots per expert, S = N*P slots.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softmoe.accelerate.build import Kernel, call
from softmoe.accelerate.guards import (
    Off,
    backward_is_plain,
    has_no_hooks,
    no_tangents,
    no_tracing_or_transforms,
    plain_float32,
    swap_class,
)
from softmoe.moe import PlacedRouter
from softmoe.moe.placed import LEAST_SPREAD, SHARPNESS, Frame, Grid, Place, grid_places, places_in_frame, slot_distances
from softmoe.moe.soft import EPS


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if why := KERNEL.why_not():
        raise Off(why)
    if not any(isinstance(module, Frame) for module in model.modules()):
        raise Off("no router with a frame in this model")
    return f"{swap_class(model, PlacedRouter, CompiledPlacedRouter)} layers"


class CompiledPlacedRouter(PlacedRouter):
    plain_class = PlacedRouter

    def with_places(self, logits_BMNP: Tensor, x_BMD: Tensor, mask: Tensor | None, grid: Grid) -> Tensor:
        if not kernel_supports(self, logits_BMNP, x_BMD, mask, grid):
            return super().with_places(logits_BMNP, x_BMD, mask, grid)
        assert self.frame is not None
        place_M2, _ = grid_places(grid, x_BMD)
        inputs = _Inputs(
            logits_BMNP.contiguous(), x_BMD.contiguous(), self.frame.direction, self.place.center, self.place.log_width
        )
        return add_places(*inputs, place_M2)


def kernel_supports(router: PlacedRouter, logits_BMNP: Tensor, x_BMD: Tensor, mask: Tensor | None, grid: Grid) -> bool:
    """True for a frame without hooks and images without masks or other tokens, in float32 that nobody transforms."""
    frame, place = router.frame, router.place
    if frame is None or mask is not None or grid[0] * grid[1] != x_BMD.shape[1]:
        return False
    tensors = (logits_BMNP, x_BMD, frame.direction, place.center, place.log_width)
    return (
        has_no_hooks(frame, Frame)
        and has_no_hooks(place, Place)
        and no_tracing_or_transforms()
        and not torch.is_autocast_enabled("cpu")
        and plain_float32(*tensors)
        and no_tangents(*tensors)
        and KERNEL.available
    )


class _Inputs(NamedTuple):
    """The tensors that get gradients."""

    logits_BMNP: Tensor
    x_BMD: Tensor
    direction_D: Tensor
    center_NP2: Tensor
    log_width_NP: Tensor


@torch.library.custom_op("softmoe::add_places", mutates_args=(), device_types="cpu")
def add_places(
    logits_BMNP: Tensor, x_BMD: Tensor, direction_D: Tensor, center_NP2: Tensor, log_width_NP: Tensor, place_M2: Tensor
) -> Tensor:
    """Return the logits less the squared distances of tokens from slots, in the frame of each image."""
    return _forward(KERNEL.library, _Inputs(logits_BMNP, x_BMD, direction_D, center_NP2, log_width_NP), place_M2)


@add_places.register_fake
def _(
    logits_BMNP: Tensor, x_BMD: Tensor, direction_D: Tensor, center_NP2: Tensor, log_width_NP: Tensor, place_M2: Tensor
) -> Tensor:
    return torch.empty_like(logits_BMNP)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gradients(ctx: Any, dout_BMNP: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, place_M2 = ctx.saved_tensors
    inputs = _Inputs(dout_BMNP, *tensors)  # the gradient does not depend on the logits
    if not backward_is_plain(dout_BMNP):
        return dout_BMNP, *_backward(KERNEL.library, inputs, place_M2), None
    needed, twice = ctx.needs_input_grad[1:5], torch.is_grad_enabled()
    with torch.enable_grad():
        output = -_plain_distances(inputs, place_M2)
        asked = [t for t, need in zip(tensors, needed, strict=True) if need]
        found = iter(torch.autograd.grad(output, asked, dout_BMNP, create_graph=twice) if asked else ())
    return dout_BMNP, *(next(found) if need else None for need in needed), None


add_places.register_autograd(_gradients, setup_context=_save)


def _plain_distances(inputs: _Inputs, place_M2: Tensor) -> Tensor:
    """Compute with torch alone, so that it can be differentiated twice, what the kernel takes from the logits."""
    places_BM2 = places_in_frame(place_M2, inputs.x_BMD, inputs.direction_D, None)
    return slot_distances(places_BM2, inputs.center_NP2, inputs.log_width_NP)


def _forward(library: ctypes.CDLL, inputs: _Inputs, place_M2: Tensor) -> Tensor:
    out = torch.empty_like(inputs.logits_BMNP)
    call(library.add_places, *_given(inputs, place_M2), out, *_sizes(inputs))
    return out


def _backward(library: ctypes.CDLL, inputs: _Inputs, place_M2: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of all inputs but the logits, in whose place their gradient stands."""
    (B, _, D), S = inputs.x_BMD.shape, inputs.log_width_NP.numel()
    inputs = inputs._replace(logits_BMNP=inputs.logits_BMNP.contiguous())
    dx_BMD, dsmall = torch.empty_like(inputs.x_BMD), inputs.x_BMD.new_empty(B, 3 * S + D)
    call(library.add_places_backward, *_given(inputs, place_M2), dx_BMD, dsmall, *_sizes(inputs))
    dcenter, dwidth_S, ddirection_D = dsmall.sum(0).split((2 * S, S, D))
    return (
        dx_BMD,
        ddirection_D,
        dcenter.view(2, S).T.reshape(inputs.center_NP2.shape),
        dwidth_S.view_as(inputs.log_width_NP),
    )


def _given(inputs: _Inputs, place_M2: Tensor) -> tuple[Tensor, ...]:
    center_2S = inputs.center_NP2.flatten(0, 1).T.contiguous()
    sharp_S = torch.exp(-2 * inputs.log_width_NP.flatten())
    return inputs.logits_BMNP, inputs.x_BMD, inputs.direction_D.contiguous(), place_M2, center_2S, sharp_S


def _sizes(inputs: _Inputs) -> tuple[int | float, ...]:
    return (*inputs.x_BMD.shape, inputs.log_width_NP.numel(), EPS, SHARPNESS, LEAST_SPREAD)


def self_test(library: ctypes.CDLL) -> bool:
    """Compare outputs and gradients with torch's."""
    B, grid, D, N, P = 2, (3, 4), 5, 4, 2
    numbers = torch.arange(B * 12 * D).remainder(13).view(B, 12, D).float() - 5
    place_M2, _ = grid_places(grid, numbers)
    logits = torch.arange(B * 12 * N * P).remainder(11).view(B, 12, N, P).float()
    center = torch.linspace(-0.2, 1.1, 2 * N * P).view(N, P, 2)
    given = (logits, numbers, torch.linspace(-0.5, 0.4, D), center, torch.linspace(-1.5, 0.2, N * P).view(N, P))
    inputs = _Inputs(*(t.requires_grad_() for t in given))
    with torch.enable_grad():
        output = inputs.logits_BMNP - _plain_distances(inputs, place_M2)
        _, *plain = torch.autograd.grad(output, inputs, logits.detach())
    with torch.no_grad():
        found = _forward(library, inputs, place_M2), *_backward(library, inputs._replace(logits_BMNP=logits), place_M2)
    pairs = zip(found, (output, *plain), strict=True)
    return all((one - other).abs().max() <= 1e-5 * other.abs().max() for one, other in pairs)


KERNEL = Kernel("frame", self_test)
