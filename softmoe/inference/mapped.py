"""Models larger than the memory: weights stay in their file and come in a layer at a time.

A loaded model's weights are mapped from the file already; pages are read when a product first touches them, and since
they are never written to, the system may drop them at any time and read them again. So that it need not guess which
ones, each block's pages are let go as soon as the block is done: a run never holds more of the weights than one block,
on top of a few activations, and is as fast as the disk (or as the file cache, if the file fits).
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from softmoe.inference.prepare import prepare
from softmoe.models import VisionTransformer
from softmoe.storage import from_pretrained


def open_mapped(where: str | Path, *, verify: bool = False) -> VisionTransformer:
    """The model of a saved folder or a run, for inference on the CPU in float32, of any size.

    `verify=True` reads the whole file first to check its sum; names, shapes and types are checked in any case.
    """
    model = prepare(from_pretrained(where, verify=verify), copy_weights=False)
    for block in model.encoder.blocks:
        block.register_forward_hook(_let_go)
    return model


def _let_go(module: nn.Module, _inputs: Any, _output: Any) -> None:
    """Give the pages of a module's weights back, those that are nothing but a file's."""
    if not sys.platform.startswith("linux"):
        return  # elsewhere the system drops pages on its own when it needs them
    files = list(_mapped_files())
    for tensor in module.parameters():
        for start, end in files:
            if start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end:
                _drop(tensor)


def _drop(tensor: Tensor) -> None:
    """Whole pages only: the first and the last may hold a neighbor's numbers."""
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Where weight files lie in this process's memory. Dropping any other memory would lose it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].endswith(".safetensors"):
            start, end = fields[0].split("-")
            yield int(start, 16), int(end, 16)
