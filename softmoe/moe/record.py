"""Look at a model from outside and leave it as it was: its routers' decisions, its outputs in evaluation mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from softmoe.moe.routing import Router, Routing


class Recording:
    """The MoE layers of a model, by name and in the model's order, and the Routing each made in the last pass.

    `with recording:` around a forward pass keeps the routings. Outside of it the hooks do nothing, so passes that the
    backward repeats (gradient checkpointing) and evaluations are not seen. A later pass replaces what an earlier one
    left, so memory stays that of one batch.
    """

    def __init__(self, model: nn.Module):
        self.routers = moe_layers(model)
        self.routings: dict[str, Routing] = {}
        self.active = False
        self._hooks: list[RemovableHandle] = [
            router.register_forward_hook(self._keep(name)) for name, router in self.routers.items()
        ]

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, routing: Routing) -> None:
            if self.active:
                self.routings[name] = routing

        return hook

    def __enter__(self) -> "Recording":
        self.active = True
        return self

    def __exit__(self, *_: object) -> None:
        self.active = False

    def clear(self) -> None:
        """Let the tensors go."""
        self.routings.clear()

    def close(self) -> None:
        """Take the hooks off the model. What was recorded stays readable."""
        for hook in self._hooks:
            hook.remove()

    def auxiliary_loss(self) -> Tensor | None:
        """Sum over the layers of the balance losses (each has its weight already); None where no router has one."""
        losses = [r.auxiliary_loss for r in self.routings.values() if getattr(r, "loss", None) is not None]
        return torch.stack(losses).sum() if losses else None


@contextmanager
def record(model: nn.Module) -> Iterator[Recording]:
    """`with record(model) as recording: model(images)` leaves each layer's Routing in `recording.routings`.

    Recordings may be nested; the hooks are gone when the context ends, however it ends.
    """
    recording = Recording(model)
    try:
        with recording:
            yield recording
    finally:
        recording.close()


def moe_layers(model: nn.Module) -> dict[str, Router]:
    """{layer: router}, where a layer is the path of its router without the last word."""
    return {layer_name(path): module for path, module in model.named_modules() if isinstance(module, Router)}


def layer_name(path: str) -> str:
    """encoder.blocks.3.mlp for encoder.blocks.3.mlp.router; the layer alone, without a model, is called moe."""
    return "moe" if path in ("", "router") else path.removesuffix(".router")


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Turn dropout and routing noise off; afterwards each model is in the mode it was in."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)
