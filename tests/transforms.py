"""Ways to derive a function that do not see into compiled code: whoever has such a pass must give them torch's own.

Each takes a function of a batch that returns one number, and the batch.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

Function = Callable[[Tensor], Tensor]


def derived_twice(function: Function, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def per_example(function: Function, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda example: function(example[None])))(x)


def batched_backward(function: Function, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(function(x), x, torch.tensor([1.0, 2.0]).to(x), is_grads_batched=True)[0]


def forward_mode(function: Function, x: Tensor) -> Tensor:
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", DeprecationWarning)  # torch's own
        y = function(forward_ad.make_dual(x.requires_grad_(), torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(y).tangent
        assert tangent is not None
        return tangent


TRANSFORMS = [derived_twice, per_example, batched_backward, forward_mode]
