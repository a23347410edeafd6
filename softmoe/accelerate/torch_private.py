"""Use private names of torch for the rest of the package; if one is gone, do without it or say so.

The private names of a technique stand in its own file; `tests/accelerate/test_torch_private.py` lists all of them.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def multiply_all_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors in place by a number, on a GPU in a few kernels; one by one if torch no longer can."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set how long the ranks of a group wait for each other. Newer versions of torch have a public way."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
        return
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


def compile_package(program: torch.export.ExportedProgram, target: Path) -> Callable[[Tensor], Tensor]:
    """Compile an exported model into one file, and return the compiled model."""
    try:
        from torch._inductor import aoti_compile_and_package, aoti_load_package
        from torch._inductor.exc import InvalidCxxCompiler
    except ImportError as error:
        raise ValueError(f"torch {torch.__version__} compiles no packages as softmoe knows them ({error})") from error
    try:
        aoti_compile_and_package(program, package_path=str(target))
    except InvalidCxxCompiler as error:
        raise ValueError("aoti compiles the model and needs a C++ compiler: install g++") from error
    return aoti_load_package(str(target))
