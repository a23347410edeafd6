"""Batches in order, made here or by worker processes: the same ones bit for bit.

Memory is bounded: `workers * prefetch` finished batches wait in shared memory, and each worker makes one
more; without workers, at most `prefetch` are made at once.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from softmoe.data.batch import Batch, EvaluationBatches, TooManyBroken, TrainBatches
from softmoe.data.fork_server import fork_server
from softmoe.data.order import check_batch
from softmoe.data.source import Source
from softmoe.data.transforms import Transform
from softmoe.storage.files import first_line

logger = logging.getLogger("softmoe.data")
_SAMPLE = 1000  # the share of broken images is not judged by fewer examples than this (or than there are)


class WorkerDied(RuntimeError):
    """Raised if a data worker was killed from outside."""


class Loader:
    """Training batches of one source. `batch_size` counts all `world` processes; each gets batch_size // world."""

    def __init__(
        self,
        source: Source,
        transform: Transform,
        batch_size: int,
        seed: int = 0,
        world: int = 1,
        rank: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        max_broken: float = 0.05,
        captions: bool = True,
        raw: bool = False,
    ):
        check_batch(batch_size, world, rank)
        if not len(source):
            raise ValueError("The data source is empty: it holds no examples.")
        if (transform.config.mixup or transform.config.cutmix) and not source.classes:
            raise ValueError("mixup and cutmix blend labels, but this source has none; set both to 0.")
        _check_workers(workers, prefetch)
        self.source, self.workers, self.prefetch, self.max_broken = source, workers, prefetch, max_broken
        self.broken: dict[str, str] = {}  # name -> reason, of all unreadable images met so far
        self._seen = 0
        self._batches = TrainBatches(source, transform, batch_size, seed, world, rank, captions, raw)

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield without end from step `start_step` on: a resumed run sees what an uninterrupted one would have."""
        if self.workers == 0 and getattr(self.source, "read_batch", None) is not None:
            firsts = itertools.count(start_step, self.prefetch)
            groups = (self._batches.make_batches(range(first, first + self.prefetch)) for first in firsts)
            made = map(self._batches.pin_if_needed, itertools.chain.from_iterable(groups))
        else:
            made = _load_batches(self._batches, itertools.count(start_step), self.workers, self.prefetch)
        for batch in made:
            self._watch(batch)
            yield batch

    def _watch(self, batch: Batch) -> None:
        self._seen += len(batch)
        for name, reason in batch.broken:
            if name not in self.broken:
                self.broken[name] = reason
                logger.warning("Skipped the image %s, which cannot be read: %s.", name, reason)
        judged_by = min(len(self.source), max(self._seen, _SAMPLE))
        if len(self.broken) > self.max_broken * judged_by:
            listed = "\n".join(f"  {name}: {reason}" for name, reason in self.broken.items())
            raise TooManyBroken(
                f"{len(self.broken)} of {judged_by} images cannot be read, more than the allowed share of "
                f"{self.max_broken:g} (max_broken, --data.max-broken of a run); repair or remove them:\n{listed}"
            )


def evaluation_batches(
    source: Source,
    transform: Transform,
    batch_size: int,
    world: int = 1,
    rank: int = 0,
    workers: int = 0,
    prefetch: int = 2,
    captions: bool = True,
    raw: bool = False,
) -> Iterator[Batch]:
    """Yield each readable example once, in order; unreadable ones are left out and listed in their batch."""
    _check_workers(workers, prefetch)
    maker = EvaluationBatches(source, transform, batch_size, world, rank, captions, raw)
    return _load_batches(maker, range(len(maker)), min(workers, len(maker)), prefetch)


@dataclass(frozen=True)
class Buffers:
    """The batches that wait for the device: each worker has `prefetch` finished ones and makes one more."""

    workers: int
    prefetch: int
    batch_bytes: int

    @property
    def bytes(self) -> int:
        """The most memory that images take before they are on the device."""
        return max(1, self.workers) * (self.prefetch + 1) * self.batch_bytes

    @classmethod
    def within(cls, limit: int, workers: int, prefetch: int, batch_bytes: int) -> Buffers:
        """Lower the wanted numbers to take at most `limit` bytes: first what is prepared ahead, then workers."""
        room = max(2, limit // max(1, batch_bytes))  # batches
        workers = min(workers, room // 2)
        return cls(workers, max(1, min(prefetch, room // max(1, workers) - 1)), batch_bytes)


def workers_for(device: str) -> int:
    """Return the number of workers of `auto`: one if training is on the CPU's cores, else one per core but one."""
    if device == "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))


def _check_workers(workers: int, prefetch: int) -> None:
    if workers < 0 or prefetch < 1:
        raise ValueError(f"workers must be at least 0 and prefetch at least 1, not {workers} and {prefetch}.")
    most = max(64, 8 * (os.cpu_count() or 1))  # each takes some 200 MB: a slip of the keyboard takes all memory
    if workers > most:
        raise ValueError(f"workers are processes that read images: at most {most} on this machine, not {workers}.")


class ErrorAsValue:
    """Makes batches in a worker and returns errors as values, so that they arrive as they were raised."""

    def __init__(self, maker: TrainBatches | EvaluationBatches):
        self.maker = maker

    def __getitem__(self, step: int) -> Batch | Exception:
        try:
            return self.maker[step]
        except Exception as error:
            return error


class _Steps:
    """An endless sampler: DataLoader asks it for the next step."""

    def __init__(self, steps: Iterable[int]):
        self.steps = steps

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)


def _load_batches(
    maker: TrainBatches | EvaluationBatches, steps: Iterable[int], workers: int, prefetch: int
) -> Iterator[Batch]:
    if workers == 0:
        yield from (maker.pin_if_needed(maker[step]) for step in steps)
        return
    made: Iterable[Any] = DataLoader(
        ErrorAsValue(maker),  # pyright: ignore[reportArgumentType]  # has what a map-style data set needs: __getitem__
        batch_size=None,
        sampler=_Steps(steps),
        num_workers=workers,
        prefetch_factor=prefetch,
        collate_fn=_as_is,
        worker_init_fn=_prepare_worker,
        pin_memory=maker.pinned,
        multiprocessing_context=_context(),
    )
    started = False
    try:
        with _without_main_script(maker):
            batches = iter(made)  # starts the workers
        for result in batches:
            started = True
            if isinstance(result, Exception):
                raise result
            yield result
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise WorkerDied(worker_died_message(first_line(error), workers, prefetch, started)) from error


@contextmanager
def _without_main_script(maker: TrainBatches | EvaluationBatches) -> Iterator[None]:
    """Start workers that do not import the user's script: without `if __name__ == "__main__":` it would begin anew.

    If the data is of classes that the script defines, workers need it and import it as usual.
    """
    main = sys.modules["__main__"]
    there = () if needs_script(maker) else vars(main).keys() & {"__spec__", "__file__"}
    hidden = {name: getattr(main, name) for name in there}
    for name in hidden:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def needs_script(maker: object) -> bool:
    """Tell if an object that is sent to another process names something of the script that runs."""
    written = _MainDetector()
    try:
        ForkingPickler(written, 4).dump(maker)  # pyright: ignore[reportArgumentType]  # it only has to be written to
    except Exception:  # the error is raised again where the object is sent
        return True
    return written.names_script


class _MainDetector:
    """A file that keeps nothing but whether `__main__` was written to it."""

    names_script = False

    def write(self, data: Any) -> None:
        self.names_script |= b"__main__" in bytes(data)


def worker_died_message(reason: str, workers: int, prefetch: int, started: bool) -> str:
    advice = f"use fewer workers than {workers} or a smaller prefetch than {prefetch}"
    if not started:  # the other common cause shows at once
        advice += ', and see that a script of your own starts its work under `if __name__ == "__main__":`'
    return f"A data worker was stopped from outside, most likely for lack of memory ({reason}); {advice}."


def _as_is(batch: Any) -> Any:
    return batch


def _prepare_worker(worker: int) -> None:
    """Let a worker ignore Ctrl-C and end with the main process, silently.

    Ctrl-C reaches every process of the terminal, and the main one decides. When it ends or is killed, the thread that
    hands over a finished batch may find the connection closed, which is no error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _except_lost_connection
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the main process is gone; DataLoader itself watches the fork server, which outlives it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _wait_for_feeders() -> None:
    """Wait for the threads that fill the queues to workers, when the process ends and all queues are closed.

    A thread may be the last to hold a queue's semaphore. If Python ended it after it removed the semaphore and before
    it told the resource tracker, the tracker would complain on stderr of a name that is not there.
    """
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(1)


Finalize(None, _wait_for_feeders, exitpriority=-10)  # queues close themselves at a higher priority, so before this


def _except_lost_connection(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def _context() -> Any:
    """Return the way workers start: from a fork server, else by spawn.

    Forking a process that runs threads (a progress display, an asynchronous save) can copy a held lock.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    return fork_server(["softmoe.data.loader"])  # torch is imported once
