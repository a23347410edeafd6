"""Linear layers by oneDNN's product, in large models on AMD processors with AVX-512: a train step 3 to 7 % shorter.

torch's own product there is MKL's, which takes a sixth more time for x w^T and dy w, and less for the gradient of the
weights. With AVX2 alone MKL's is not the slower one (measured: 164 GFLOP/s to oneDNN's 152).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.accelerate.build import turned_off
from softmoe.accelerate.guards import Off, backward_is_plain, kernel_applies, swap_class
from softmoe.machine import is_amd_avx512
from softmoe.models.transformer import XavierLinear

LARGE = 1 << 22
"""Bytes of the input, or of an output that is larger: below, MKL's product was not measured to be the slower one."""


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if not use_onednn():
        raise Off("not an AMD processor with AVX-512, or this torch has no such product")
    if not (count := sum(swap_class(model, kind.plain_class, kind) for kind in (OneDNNLinear, OneDNNXavierLinear))):
        raise Off("no linear layer in this model")
    return f"{count} layers"


class OneDNNLinear(nn.Linear):
    plain_class: type[nn.Linear] = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() > 1 and kernel_applies(input, *self.parameters()) and self.is_large(input) and use_onednn():
            return linear(input, self.weight, self.bias)
        return super().forward(input)

    def without_bias(self, input: Tensor) -> Tensor:
        """Return the product without the bias. The caller has checked that a kernel applies to the input."""
        if self.is_large(input) and use_onednn():
            return linear(input, self.weight, None)
        return F.linear(input, self.weight)

    def is_large(self, input: Tensor) -> bool:
        return max(1, self.out_features // self.in_features) * input.nbytes > LARGE


class OneDNNXavierLinear(OneDNNLinear, XavierLinear):
    plain_class = XavierLinear


@torch.library.custom_op("softmoe::onednn_linear", mutates_args=(), device_types="cpu")
def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return _onednn(x, w, bias)


@linear.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias = ctx.needs_input_grad
    product = F.linear if backward_is_plain(dy) else _onednn
    rows = dy.reshape(-1, w.shape[0])
    return (
        product(dy, w.t()) if needs_x else None,
        rows.t() @ x.reshape(-1, w.shape[1]) if needs_w else None,
        rows.sum(0) if needs_bias else None,
    )


linear.register_autograd(_backward, setup_context=_save)


def _onednn(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), w, bias, "none", [], "")


def use_onednn() -> bool:
    """True if oneDNN's product is there, is right, and is the faster one on this processor."""
    return not turned_off() and _works()


@cache
def _works() -> bool:
    return is_amd_avx512() and torch.backends.mkldnn.is_available() and self_test()


def self_test() -> bool:
    """Compare with torch on whole numbers, exact in every order: the operator is a private one, and may change."""
    x, w, bias = (torch.arange(n).remainder(7).float() for n in (2 * 5 * 12, 8 * 12, 8))
    x, w = x.view(2, 5, 12), w.view(8, 12)
    try:
        with torch.no_grad():
            y = _onednn(x, w, bias)
            return torch.equal(y, x @ w.t() + bias) and torch.equal(_onednn(y, w.t()), y @ w)
    except (AttributeError, RuntimeError, TypeError):
        return False
