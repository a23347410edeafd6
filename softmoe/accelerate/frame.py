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
from softmoe.accelerate.guards import Off, backward_is_plain, has_no_hooks, plain_call, swap_class
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
        place = self.place
        return _AddPlaces.apply(grid, logits_BMNP, x_BMD, self.frame.direction, place.center, place.log_width)  # pyright: ignore[reportReturnType]


def kernel_supports(router: PlacedRouter, logits_BMNP: Tensor, x_BMD: Tensor, mask: Tensor | None, grid: Grid) -> bool:
    """True for a frame without hooks and images without masks or other tokens, in float32 that nobody transforms."""
    frame, place = router.frame, router.place
    if frame is None or mask is not None or grid[0] * grid[1] != x_BMD.shape[1]:
        return False
    tensors = (logits_BMNP, x_BMD, frame.direction, place.center, place.log_width)
    return has_no_hooks(frame, Frame) and has_no_hooks(place, Place) and plain_call(*tensors) and KERNEL.available


class _Inputs(NamedTuple):
    """The tensors that get gradients."""

    logits_BMNP: Tensor
    x_BMD: Tensor
    direction_D: Tensor
    center_NP2: Tensor
    log_width_NP: Tensor


class _AddPlaces(torch.autograd.Function):
    """Takes from the logits the squared distances of tokens from slots, in the frame of each image.

    It is no operator of torch's: nobody who traces comes here, and to call one takes longer than this pass.
    """

    @staticmethod
    def forward(ctx: Any, grid: Grid, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = _Inputs(*(t.contiguous() for t in tensors))
        ctx.grid = grid
        ctx.save_for_backward(*tensors[1:])
        return _forward(KERNEL.library, inputs, grid)

    @staticmethod
    def backward(ctx: Any, dout_BMNP: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors
        if not backward_is_plain(dout_BMNP):
            given = _Inputs(*(t.contiguous() for t in (dout_BMNP, *tensors)))
            return None, dout_BMNP, *_backward(KERNEL.library, given, ctx.grid)
        needed, twice = ctx.needs_input_grad[2:], torch.is_grad_enabled()
        with torch.enable_grad():
            output = -_plain_distances(ctx.grid, *tensors)
            asked = [t for t, need in zip(tensors, needed, strict=True) if need]
            found = iter(torch.autograd.grad(output, asked, dout_BMNP, create_graph=twice) if asked else ())
        return None, dout_BMNP, *(next(found) if need else None for need in needed)


def _plain_distances(grid: Grid, x_BMD: Tensor, direction_D: Tensor, center_NP2: Tensor, width_NP: Tensor) -> Tensor:
    """Compute with torch alone, so that it can be differentiated twice, what the kernel takes from the logits."""
    place_M2, _ = grid_places(grid, x_BMD)
    return slot_distances(places_in_frame(place_M2, x_BMD, direction_D, None), center_NP2, width_NP)


def _forward(library: ctypes.CDLL, inputs: _Inputs, grid: Grid) -> Tensor:
    out = torch.empty_like(inputs.logits_BMNP)
    call(library.add_places, *inputs, out, *_sizes(inputs, grid))
    return out


def _backward(library: ctypes.CDLL, inputs: _Inputs, grid: Grid) -> tuple[Tensor, ...]:
    """Return the gradients of all inputs but the logits, in whose place their gradient stands."""
    found = tuple(torch.empty_like(t) for t in inputs[1:])
    call(library.add_places_backward, *inputs, *found, *_sizes(inputs, grid))
    return found


def _sizes(inputs: _Inputs, grid: Grid) -> tuple[int | float, ...]:
    B, _, D = inputs.x_BMD.shape
    return (B, *grid, D, inputs.log_width_NP.numel(), EPS, SHARPNESS, LEAST_SPREAD)


def self_test(library: ctypes.CDLL) -> bool:
    """Compare outputs and gradients with torch's."""
    B, grid, D, N, P = 2, (3, 4), 5, 4, 2
    numbers = torch.arange(B * 12 * D).remainder(13).view(B, 12, D).float() - 5
    logits = torch.arange(B * 12 * N * P).remainder(11).view(B, 12, N, P).float()
    center = torch.linspace(-0.2, 1.1, 2 * N * P).view(N, P, 2)
    given = _Inputs(logits, numbers, torch.linspace(-0.5, 0.4, D), center, torch.linspace(-1.5, 0.2, N * P).view(N, P))
    with torch.enable_grad():
        tensors = [t.clone().requires_grad_() for t in given[1:]]
        distances = _plain_distances(grid, *tensors)
        plain = torch.autograd.grad(-distances, tensors, logits)
    found = _forward(library, given, grid), *_backward(library, given, grid)
    pairs = zip(found, (logits - distances.detach(), *plain), strict=True)
    return all((one - other).abs().max() <= 1e-5 * other.abs().max() for one, other in pairs)


KERNEL = Kernel("frame", self_test)
