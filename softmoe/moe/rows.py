"""The compiled products of rows.cpp, for experts that see few rows each: there, reading the weights takes the time."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softmoe.compiled import LANES, address, library_of, loaded, plain, threads

MOST = 32
"""Rows; with more, the usual products have enough to do while they read."""
LARGE = 1 << 25
"""Bytes of all weights; smaller ones may stay in a cache."""


def serve(x_NSK: Tensor, w: Tensor, *others: Tensor) -> bool:
    """Whether the compiled products take these: plain float32 tensors on a CPU, few rows, large weights."""
    return (
        x_NSK.shape[1] <= MOST
        and w.nbytes >= LARGE
        and w.shape[2] % LANES == 0
        and plain(x_NSK, w, *others)
        and w.is_contiguous()
        and isinstance(_library(), ctypes.CDLL)
    )


def across(x_NSP: Tensor, w_NPQ: Tensor, bias_NQ: Tensor | None = None) -> Tensor:
    """x w + bias, (N, S, Q)."""
    return _read("across", x_NSP, w_NPQ, bias_NQ, w_NPQ.shape[2])


def along(x_NSQ: Tensor, w_NPQ: Tensor, bias_NP: Tensor | None = None) -> Tensor:
    """x w^T + bias, (N, S, P)."""
    return _read("along", x_NSQ, w_NPQ, bias_NP, w_NPQ.shape[1])


def outer(a_NSP: Tensor, b_NSQ: Tensor, out_NPQ: Tensor) -> float:
    """a^T b, written to `out`, which begins at a multiple of 64 bytes. Returns the sum of its squares."""
    assert out_NPQ.data_ptr() % 64 == 0
    return _outer(loaded(_library()), a_NSP, b_NSQ, out_NPQ)


def _read(name: str, x: Tensor, w: Tensor, bias: Tensor | None, width: int) -> Tensor:
    return _product(getattr(loaded(_library()), name), x, w, bias, width)


def _product(function: Callable[..., Any], x: Tensor, w: Tensor, bias: Tensor | None, width: int) -> Tensor:
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    y = x.new_empty(x.shape[0], x.shape[1], width)
    sizes = (x.shape[0], x.shape[1], w.shape[1], w.shape[2])
    added = None if bias is None else address(bias)
    function(address(x), address(w), added, address(y), *map(ctypes.c_int64, sizes), threads())
    return y


def _outer(library: ctypes.CDLL, a: Tensor, b: Tensor, out: Tensor) -> float:
    a, b = a.contiguous(), b.contiguous()
    sizes = (a.shape[0], a.shape[1], a.shape[2], b.shape[2])
    function = library.outer
    function.restype = ctypes.c_double
    return function(address(a), address(b), address(out), *map(ctypes.c_int64, sizes), threads())


@cache
def _library() -> ctypes.CDLL | str:
    return library_of(Path(__file__).with_name("rows.cpp"), _right)


def _right(library: ctypes.CDLL) -> bool:
    """Whole numbers, exact in every order of summation."""
    x = torch.arange(2 * 5 * 6).remainder(7).view(2, 5, 6).float() - 3
    w = torch.arange(2 * 6 * 32).remainder(11).view(2, 6, 32).float() - 5
    y = _product(library.across, x, w, w[:, 0], 32)
    back = _product(library.along, y, w, None, 6)
    gradient = torch.empty_like(w)
    squares = _outer(library, x, y, gradient)
    exact = x @ w + w[:, :1]
    return (
        torch.equal(y, exact)
        and torch.equal(back, exact @ w.transpose(1, 2))
        and torch.equal(gradient, x.transpose(1, 2) @ exact)
        and squares == gradient.square().sum().item()
    )
