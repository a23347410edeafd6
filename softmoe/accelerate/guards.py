"""The conditions under which compiled code may replace torch's, and the swap of a module's class.

Compiled code sees plain float32 numbers on a CPU and nothing else. Whoever traces, transforms, counts or hooks what a
layer computes gets torch's own operators instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

LARGE = 1 << 16
"""Bytes; for smaller tensors the call itself takes most of the time."""
LANES = 16
"""Numbers in the widest vector that the compiled loops use."""
TORCH_2_9 = torch.__version__.startswith("2.9.")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ASYNC_DEVICES = ("cuda",)
"""Devices that the host does not wait for in a step: they skip bad steps themselves, and are read a step late."""
T = TypeVar("T", bound=nn.Module)


class Off(Exception):
    """Raised by a technique that does nothing here; the text says why."""


def swap_class(model: nn.Module, plain: type[nn.Module], fast: type[nn.Module], *, again: bool = False) -> int:
    """Give every module of exactly the class `plain` the class `fast`, a subclass of it; returns how many there are.

    The object stays, with its parameters, names and hooks, and so does whoever refers to it. Copies have the new class
    too. With `again` modules whose class another technique swapped are taken as well.
    """
    assert issubclass(fast, plain)
    found = [module for module in model.modules() if type(module) is plain or (again and is_exactly(module, plain))]
    for module in found:
        module.__class__ = fast
    return len(found)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class a module had before a technique changed it, or its own."""
    return getattr(type(module), "plain_class", type(module))


def is_exactly(module: nn.Module, kind: type[T]) -> TypeGuard[T]:
    """True for this class and a fast one that a technique swapped for it, not for other subclasses."""
    return plain_class(module) is kind


def kernel_applies(x: Tensor, *others: Tensor, times: int = 1) -> bool:
    """True for plain contiguous tensors that nobody traces or transforms, if `times` the bytes of x exceed LARGE."""
    if torch.compiler.is_compiling():  # where shapes are symbols, a tensor has no number of bytes
        return False
    return times * x.nbytes > LARGE and plain_call(x, *others) and all(t.is_contiguous() for t in (x, *others))


def plain_call(*tensors: Tensor) -> bool:
    """True for float32 tensors on a CPU that nobody traces, transforms, casts or differentiates forward."""
    return (
        no_tracing_or_transforms()
        and not torch.is_autocast_enabled("cpu")
        and plain_float32(*tensors)
        and no_tangents(*tensors)
    )


def plain_float32(*tensors: Tensor) -> bool:
    """True if all tensors are float32 on a CPU, and of no subclass with operators of its own."""
    kinds = (Tensor, nn.Parameter)
    return all(type(t) in kinds and t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


def no_tangents(*tensors: Tensor) -> bool:
    """True outside of forward-mode differentiation."""
    return all(forward_ad.unpack_dual(t).tangent is None for t in tensors)


def backward_is_plain(*gradients: Tensor) -> bool:
    """True where the backward pass is itself differentiated, traced or batched: torch must compute it then."""
    batched = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]
    return torch.is_grad_enabled() or not no_tracing_or_transforms() or any(batched(g) for g in gradients)


def no_tracing_or_transforms() -> bool:
    """True if nobody compiles, traces, transforms or counts what is computed now."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or torch._C._are_functorch_transforms_active()
    )


def is_exporting() -> bool:
    """Tell if a model is being exported. While torch 2.9 compiles one, its own answer is yes too."""
    compiled = TORCH_2_9 and torch.compiler.is_dynamo_compiling()
    return torch.compiler.is_exporting() and not compiled


def has_no_hooks(layer: nn.Module, kind: type[T]) -> TypeGuard[T]:
    """True if the layer is of exactly this class (or its fast one), without hooks or a `forward` of its own."""
    own = (getattr(layer, name) for name in _HOOKS)
    everyones = (getattr(torch_module, f"_global{name}") for name in _HOOKS)
    return is_exactly(layer, kind) and "forward" not in vars(layer) and not any(own) and not any(everyones)


def is_async(device: torch.device) -> bool:
    """Tell if the host goes on while this device works, and reads its numbers later."""
    return device.type in ASYNC_DEVICES


@contextmanager
def skipped_where(optimizer: torch.optim.Optimizer, flag: Tensor) -> Iterator[None]:
    """Make `optimizer.step` leave everything as it is if `flag` is true.

    The host need not read the flag: torch's fused updates and CompactAdamW look at it on the device.
    """
    keeper: Any = optimizer
    keeper.found_inf = flag.float()
    try:
        yield
    finally:
        del keeper.found_inf
