"""See what the routers of a model decide, from outside: forward hooks that run only when asked."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from softmoe.moe import Router, Routing


class RoutingTap:
    """`with tap:` around a forward pass keeps each router's Routing in `tap.routings`, by the router's name.

    Outside the context the hooks do nothing, so passes that the backward repeats (gradient checkpointing) and
    evaluations are not seen. `clear` lets the tensors go.
    """

    def __init__(self, model: nn.Module):
        self.routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
        self.routings: dict[str, Routing] = {}
        self.active = False
        for name, router in self.routers.items():
            router.register_forward_hook(self._keep(name))

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, routing: Routing) -> None:
            if self.active:
                self.routings[name] = routing

        return hook

    def __enter__(self) -> "RoutingTap":
        self.active = True
        return self

    def __exit__(self, *_: object) -> None:
        self.active = False

    def clear(self) -> None:
        self.routings.clear()

    def auxiliary_loss(self) -> Tensor | None:
        """Sum over the layers of the balance losses (each has its weight already); None where no router has one."""
        losses = [r.auxiliary_loss for r in self.routings.values() if getattr(r, "loss", None) is not None]
        return torch.stack(losses).sum() if losses else None
