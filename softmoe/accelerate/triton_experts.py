"""The experts' two batched products by a Triton kernel on CUDA devices, with bias and GELU (tanh) before storing.

Letters: N experts, S rows per expert, D width, H hidden width.

The kernel is in kernels/product.py. The hidden rows are kept only as they are before the activation, which is computed
again in the backward pass. Products without bias and activation are torch's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from softmoe.accelerate import fastest
from softmoe.accelerate.guards import Off, is_exporting, swap_class
from softmoe.accelerate.soft import in_autocast_dtype
from softmoe.moe import Experts


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    fastest.need_triton(model)
    if not (count := swap_class(model, Experts, TritonExperts, again=True)):
        raise Off("no experts in this model")
    return f"{count} layers, for the shapes where they are faster"


class TritonExperts(Experts):
    plain_class = Experts
    use_kernels = False
    """Whether the kernels were the faster at the last call; a compiler that traces the experts does the same."""

    def forward(self, x_NSD: Tensor) -> Tensor:
        weights = (self.w1, self.b1, self.w2, self.b2)
        if not torch.compiler.is_compiling():
            self.use_kernels = (
                self.activation == "gelu_tanh"
                and not (self.training and self.dropout)
                and x_NSD.ndim == 3
                and x_NSD.shape[0] == self.num_experts
                and x_NSD.shape[2] == self.dim
                and fastest.may_use(x_NSD, *weights)
                and fastest.kernel_is_faster("experts", by_torch, by_kernels, x_NSD, *weights)
            )
        if not self.use_kernels or is_exporting():  # an exported file runs without this package
            return super().forward(x_NSD)
        return by_kernels(x_NSD, *weights)


def by_torch(x_NSD: Tensor, w1_NDH: Tensor, b1_NH: Tensor, w2_NDH: Tensor, b2_ND: Tensor) -> Tensor:
    active_NSH = nn.functional.gelu(torch.baddbmm(b1_NH.unsqueeze(1), x_NSD, w1_NDH), approximate="tanh")
    return torch.baddbmm(b2_ND.unsqueeze(2), w2_NDH, active_NSH.transpose(1, 2)).transpose(1, 2)


def by_kernels(x_NSD: Tensor, w1_NDH: Tensor, b1_NH: Tensor, w2_NDH: Tensor, b2_ND: Tensor) -> Tensor:
    tensors = [in_autocast_dtype(t) for t in (x_NSD, w1_NDH, b1_NH, w2_NDH, b2_ND)]
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return mlp(*tensors, keep)[0]


@torch.library.custom_op("softmoe::triton_mlp", mutates_args=())
def mlp(
    x_NSD: Tensor, w1_NDH: Tensor, b1_NH: Tensor, w2_NDH: Tensor, b2_ND: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return gelu(x w1 + b1) w2^T + b2, and the hidden rows before the activation, empty unless `keep`."""
    from softmoe.accelerate.kernels.product import product, product_gelu

    active_NSH, hidden_NSH = product_gelu(x_NSD, w1_NDH, b1_NH, keep)
    return product(active_NSH, w2_NDH.transpose(1, 2), b2_ND), hidden_NSH


@mlp.register_fake
def _(x_NSD: Tensor, w1_NDH: Tensor, b1_NH: Tensor, w2_NDH: Tensor, b2_ND: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    N, S, D = x_NSD.shape
    return x_NSD.new_empty(N, S, D), x_NSD.new_empty((N, S, w1_NDH.shape[2]) if keep else 0)


@torch.library.custom_op("softmoe::triton_mlp_backward", mutates_args=())
def hidden_gradient(d_NSD: Tensor, w2_NDH: Tensor, hidden_NSH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the hidden rows before the activation, and the hidden rows after it."""
    from softmoe.accelerate.kernels.product import product_gelu_backward

    return product_gelu_backward(d_NSD, w2_NDH, hidden_NSH)


@hidden_gradient.register_fake
def _(d_NSD: Tensor, w2_NDH: Tensor, hidden_NSH: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden_NSH), torch.empty_like(hidden_NSH)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_NSD, w1_NDH, _, w2_NDH, _, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x_NSD, w1_NDH, w2_NDH, output[1])


def _backward(ctx: Any, d_NSD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x_NSD, w1_NDH, w2_NDH, hidden_NSH = ctx.saved_tensors
    d_hidden_NSH, active_NSH = hidden_gradient(d_NSD, w2_NDH, hidden_NSH)
    return (
        torch.bmm(d_hidden_NSH, w1_NDH.transpose(1, 2)),
        torch.bmm(x_NSD.transpose(1, 2), d_hidden_NSH),
        d_hidden_NSH.sum(1),
        torch.bmm(d_NSD.transpose(1, 2), active_NSH),
        d_NSD.sum(1),
        None,
    )


mlp.register_autograd(_backward, setup_context=_save)
