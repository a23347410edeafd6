"""Bring batches to a device: images leave the workers as uint8, and the last transforms are done on the device.

A raw batch has its images as (B, H, W, 3) uint8, a quarter of the bytes; `finish` mirrors, scales, erases and blends
them with the numbers that the worker drew, to the same bits as a batch that was made for the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from softmoe.data.batch import Batch, mixed, tensors_of
from softmoe.machine import event_on

HOST = ("indices", "draws")
"""Fields that stay on the host, which uses them to choose captions and to name examples."""


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy images and labels to the device.

    Copies from pinned memory to CUDA are not waited for; on mps they must be, since torch would free what is still
    being copied.
    """
    if device.type == "cpu":
        return batch
    beside = device.type == "cuda"
    moved = {n: value.to(device, non_blocking=beside) for n, value in tensors_of(batch).items() if n not in HOST}
    return dataclasses.replace(batch, **moved)


def finish(batch: Batch, classes: int) -> Batch:
    """Do the last transforms of a raw batch, on the device where it is. `classes` is the number of classes."""
    if batch.images.dtype != torch.uint8:
        return batch
    images = batch.images.permute(0, 3, 1, 2)
    if batch.mirrored is not None:
        images = torch.where(batch.mirrored[:, None, None, None], images.flip(3), images)
    images = images.to(torch.float32, memory_format=torch.contiguous_format).mul_(2 / 255).sub_(1)
    return mixed(dataclasses.replace(batch, images=images, mirrored=None), classes)


class Feed:
    """Batches for a device, one ahead: `fetch` sends the next one on its way while the device works, `take` gives it.

    On CUDA the copy runs beside the computation, on a stream of its own.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device, classes: int = 0):
        self.batches, self.device, self.classes = iter(batches), device, classes
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: Any = None
        self.starved = 0
        """Batches for which a CUDA device had to wait with nothing to do."""

    def fetch(self) -> Exception | None:
        """Start to copy the next batch, or return the error: all processes must know of it before they stop."""
        given = None if self.stream is None else event_on(self.device)  # the last of the work that the device has
        try:
            batch = next(self.batches)
            self.starved += int(given is not None and given.query())
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                self._next = finish(to_device(batch, self.device), self.classes)
        except Exception as error:
            return error
        return None

    def take(self) -> Any:
        """Return the batch that was fetched. Work that is given to the device from now on comes after its arrival."""
        batch, self._next = self._next, None
        if self.stream is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self.stream)
            for tensor in tensors_of(batch).values():
                if tensor.device.type == "cuda":
                    tensor.record_stream(now)  # its memory is not given away before this work is done
        return batch


def batches_on_device(batches: Iterable[Batch], device: torch.device, classes: int = 0) -> Iterator[Batch]:
    """Yield the batches of an evaluation on the device, one ahead of the model."""
    if device.type == "cpu":
        yield from (finish(batch, classes) for batch in batches)
        return
    feed = Feed(batches, device, classes)
    failure = feed.fetch()
    while failure is None:
        batch = feed.take()
        failure = feed.fetch()
        yield batch
    if not isinstance(failure, StopIteration):
        raise failure


def results_on_host(results: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Bring tuples of tensors to the host.

    From CUDA they come one batch behind: the next is already computed while the host looks at the last, and the device
    never waits for the host.
    """
    held: tuple[tuple[Tensor, ...], torch.cuda.Event] | None = None
    for result in results:
        if not any(tensor.device.type == "cuda" for tensor in result):
            yield tuple(tensor.cpu() for tensor in result)
            continue
        copies = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in result)
        for copy, tensor in zip(copies, result, strict=True):
            copy.copy_(tensor, non_blocking=True)
        there = next(tensor.device for tensor in result if tensor.device.type == "cuda")
        before, held = held, (copies, event_on(there))
        if before is not None:
            before[1].synchronize()
            yield before[0]
    if held is not None:
        held[1].synchronize()
        yield held[0]
