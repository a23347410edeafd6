"""Keep the memory that a step frees for the next one, on Linux: the system need not clear its pages again.

By default malloc gives large blocks, and the free end of its heap, back to the system at once. A training step asks for
the same blocks as the one before, and the system clears every page of them anew: up to a tenth of the time of a step of
a small model. Up to 2 GiB of free memory stay with the process. Blocks of more than 32 MiB still go back.
"""

import ctypes
import os
import sys

import torch
from torch import nn

from softmoe.accelerate.guards import Off

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names and numbers of glibc's malloc.h
LARGEST_BLOCK = 32 << 20  # glibc takes no larger one
MOST_KEPT = (1 << 31) - 1


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if optimizer is None:
        raise Off("no optimizer was given")
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise Off("not on a CPU")
    if own := next((name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))), None):
        raise Off(f"{own} is set")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    settings = ((M_MMAP_THRESHOLD, LARGEST_BLOCK), (M_TRIM_THRESHOLD, MOST_KEPT))
    if mallopt is None or not all(mallopt(name, value) for name, value in settings):
        raise Off("for malloc of glibc")
    return f"up to {MOST_KEPT + 1 >> 30} GiB stay with the process"
