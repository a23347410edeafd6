"""Linear layers of large models. In a training step on an AMD processor their products are those of oneDNN.

torch's own there are MKL's, which takes a sixth more time for x w^T and dy w, and less for the gradient of the weights.
"""

from functools import cache
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module

from softmoe.compiled import worth_it, worth_it_backward
from softmoe.machine import is_amd

T = TypeVar("T", bound=nn.Module)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def dense(x: Tensor, layer: nn.Module) -> Tensor:
    """layer(x)."""
    if unheard(layer, nn.Linear):
        times = max(1, layer.out_features // layer.in_features)
        if x.dim() > 1 and worth_it(x, *layer.parameters(), times=times):
            return product(x, layer.weight, layer.bias)
    return layer(x)


def unheard(layer: nn.Module, kind: type[T]) -> TypeGuard[T]:
    """Of exactly that kind, and nobody will miss its call: it has no hooks and no `forward` of its own."""
    own = (getattr(layer, name) for name in _HOOKS)
    everyones = (getattr(module, f"_global{name}") for name in _HOOKS)
    return type(layer) is kind and "forward" not in vars(layer) and not any(own) and not any(everyones)


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w^T + bias of tensors that are worth it."""
    return _Dense.apply(x, w, bias) if faster() else F.linear(x, w, bias)  # pyright: ignore[reportReturnType]


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, w)
        return _onednn(x, w, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad
        linear = _onednn if worth_it_backward(dy) else F.linear
        rows = dy.reshape(-1, w.shape[0])
        return (
            linear(dy, w.t()) if needs_x else None,
            rows.t() @ x.reshape(-1, w.shape[1]) if needs_w else None,
            rows.sum(0) if needs_bias else None,
        )


def _onednn(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), w, bias, "none", [], "")


@cache
def faster() -> bool:
    """Whether oneDNN's product is here, is what it was when it was measured, and is the faster one."""
    return is_amd() and torch.backends.mkldnn.is_available() and _right()


def _right() -> bool:
    """Whole numbers, exact in every order of summation. The operator is one of torch's inner ones: it may change."""
    x, w, bias = (torch.arange(n).remainder(7).float() for n in (2 * 5 * 12, 8 * 12, 8))
    x, w = x.view(2, 5, 12), w.view(8, 12)
    try:
        with torch.no_grad():
            y = _onednn(x, w, bias)
            return torch.equal(y, x @ w.t() + bias) and torch.equal(_onednn(y, w.t()), y @ w)
    except (AttributeError, RuntimeError, TypeError):
        return False
