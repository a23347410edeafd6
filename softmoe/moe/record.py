"""Record the routings of a model from outside, and run it in evaluation mode, leaving it as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from softmoe.moe.routing import Router, Routing
from softmoe.moe.slots import NotCombined, SlotsRouter, ToSlots


class Recording:
    """Keeps the Routing that each MoE layer of a model made in the last recorded forward pass, by the layer's name.

    `with recording:` around a forward pass records it. Outside of it the hooks do nothing, so that evaluations, and
    passes repeated by gradient checkpointing, are not recorded. A later pass replaces the routings of an earlier one,
    so memory stays that of one batch.
    """

    def __init__(self, model: nn.Module):
        self.routers = routers_by_layer(model)
        self.routings: dict[str, Routing] = {}
        self.active = False
        to_slots = {layer_name(path) for path, module in model.named_modules() if isinstance(module, ToSlots)}
        self._hooks: list[RemovableHandle] = [
            router.register_forward_hook(self._keep(name, name in to_slots)) for name, router in self.routers.items()
        ]

    def _keep(self, name: str, to_slots: bool) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, routing: Routing) -> None:
            if self.active:
                self.routings[name] = NotCombined(routing) if to_slots else routing

        return hook

    def __enter__(self) -> "Recording":
        self.active = True
        return self

    def __exit__(self, *_: object) -> None:
        self.active = False

    def clear(self) -> None:
        """Free the recorded tensors."""
        self.routings.clear()

    def close(self) -> None:
        """Remove the hooks from the model. The recorded routings stay."""
        for hook in self._hooks:
            hook.remove()

    def auxiliary_loss(self) -> Tensor | None:
        """Return the sum of the layers' balance losses, which are weighted already; None if nothing was recorded."""
        losses = [routing.auxiliary_loss for routing in self.routings.values()]
        return torch.stack(losses).sum() if losses else None


@contextmanager
def record(model: nn.Module) -> Iterator[Recording]:
    """Record the forward passes made in this context.

    `with record(model) as recording: model(images)` leaves each layer's Routing in `recording.routings`. Recordings may
    be nested; the hooks are removed when the context ends, however it ends.
    """
    recording = Recording(model)
    try:
        with recording:
            yield recording
    finally:
        recording.close()


def routers_by_layer(model: nn.Module) -> dict[str, Router]:
    """Return the router of each MoE layer that routes, by the layer's name: the router's path without its last word."""
    routers = {path: module for path, module in model.named_modules() if isinstance(module, Router)}
    return {layer_name(path): router for path, router in routers.items() if not isinstance(router, SlotsRouter)}


def layer_name(path: str) -> str:
    """Return encoder.blocks.3.mlp for encoder.blocks.3.mlp.router; a layer without a model around it is called moe."""
    return "moe" if path in ("", "router") else path.removesuffix(".router")


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models in evaluation mode (no dropout, no routing noise), and each module back in its own mode at the end."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
