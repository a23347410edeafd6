"""Keep what the routers of a model decide, from outside: the layers compute as always and are not told."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from softmoe.moe import Router, Routing


@dataclass(frozen=True)
class Recording:
    """The MoE layers of a model, by name and in the model's order, and the Routing each made in the last pass."""

    routers: dict[str, Router]
    routings: dict[str, Routing] = field(default_factory=dict)

    def clear(self) -> None:
        """Let the tensors go."""
        self.routings.clear()


@contextmanager
def record(model: nn.Module) -> Iterator[Recording]:
    """`with record(model) as recording: model(images)` leaves each layer's Routing in `recording.routings`.

    A later pass replaces what an earlier one left, so memory stays that of one batch. Recordings may be nested; the
    hooks are gone when the context ends, however it ends. What was recorded stays readable.
    """
    recording = Recording(moe_layers(model))
    hooks = [router.register_forward_hook(_keep(recording, name)) for name, router in recording.routers.items()]
    try:
        yield recording
    finally:
        for hook in hooks:
            hook.remove()


def moe_layers(model: nn.Module) -> dict[str, Router]:
    """{layer: router}, where a layer is the path of its router without the last word."""
    return {layer_name(path): module for path, module in model.named_modules() if isinstance(module, Router)}


def layer_name(path: str) -> str:
    """encoder.blocks.3.mlp for encoder.blocks.3.mlp.router; the layer alone, without a model, is called moe."""
    return "moe" if path in ("", "router") else path.removesuffix(".router")


def _keep(recording: Recording, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple, routing: Routing) -> None:
        recording.routings[name] = routing

    return hook
