"""The experts' activation. In a training step on a CPU it is that of gelu.cpp: a third of the time of torch's."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from softmoe.compiled import address, library_of, loaded, threads, worth_it, worth_it_backward

ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}  # name -> torch's word for how the error function is computed


def gelu(x: Tensor, activation: str) -> Tensor:
    if activation == "gelu_tanh" and worth_it(x) and isinstance(_library(), ctypes.CDLL):
        return _Gelu.apply(x)  # pyright: ignore[reportReturnType]
    return F.gelu(x, approximate=ACTIVATIONS[activation])


def check_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return name


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return _call("gelu", x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        if worth_it_backward(dy):
            return _call("gelu_backward", x, dy.contiguous())
        return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")


def _call(name: str, *inputs: Tensor) -> Tensor:
    return _pass(loaded(_library()), name, *inputs)


def _pass(library: ctypes.CDLL, name: str, *inputs: Tensor) -> Tensor:
    out = torch.empty_like(inputs[0])
    getattr(library, name)(*map(address, inputs), address(out), ctypes.c_int64(out.numel()), threads())
    return out


@cache
def _library() -> ctypes.CDLL | str:
    return library_of(Path(__file__).with_name("gelu.cpp"), _right)


def _right(library: ctypes.CDLL) -> bool:
    x = torch.linspace(-12, 12, 1001)
    exact = x.double()
    dy = torch.linspace(2, -1, 1001)
    gradient = torch.ops.aten.gelu_backward(dy.double(), exact, approximate="tanh")
    return torch.allclose(
        _pass(library, "gelu", x).double(), F.gelu(exact, approximate="tanh"), rtol=1e-6, atol=1e-7
    ) and torch.allclose(_pass(library, "gelu_backward", x, dy).double(), gradient, rtol=1e-5, atol=1e-6)
