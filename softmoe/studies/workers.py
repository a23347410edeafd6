"""Do the jobs of a study, one after another or several at a time, each in a process of its own."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

from softmoe.machine import allow_interrupts, end_with_parent, interrupts_blocked
from softmoe.studies.jobs import Job, Stopped

if TYPE_CHECKING:
    from softmoe.studies.driver import Store

Outcome = dict[str, float] | str
"""Numbers, or why there are none."""
INTERRUPTED = threading.Event()
"""In a worker's process: Ctrl-C came, so that no other job begins."""


def execute(pending: list[Job], store: "Store", jobs: int) -> Iterator[tuple[Job, Outcome]]:
    """Yield each job when it is done or has failed; raise Stopped if a signal asked for it."""
    if jobs > 1 and len(pending) > 1:
        yield from execute_together(pending, store, jobs)
        return
    for job in pending:
        yield job, attempt(store, job)


def attempt(store: "Store", job: Job) -> Outcome:
    try:
        return store.work(job)
    except Exception as error:
        if isinstance(error, Stopped):
            raise
        return f"{type(error).__name__}: {error}"


def execute_together(pending: list[Job], store: "Store", jobs: int) -> Iterator[tuple[Job, Outcome]]:
    """Run jobs in processes of one thread each; with several GPUs each process sees one.

    First those that need no other job.
    """
    context = multiprocessing.get_context("spawn")
    places = context.Queue()
    for place in range(jobs):
        places.put(place)
    first = [job for job in pending if job.needs is None]
    later = [job for job in pending if job.needs is not None]
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=own_worker, initargs=(places,)) as pool:
        for batch in (first, later):
            with interrupts_blocked():  # the first call starts the processes
                waiting: dict[Future[Outcome], Job] = {pool.submit(attempt_apart, store, job): job for job in batch}
            try:
                for future in as_completed(waiting):
                    yield waiting[future], future.result()
            except BaseException:  # what has not begun is not begun; what runs saves itself on the same signal
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def own_worker(places) -> None:
    """Make a worker's process its own: one CPU thread, one GPU. It saves its run and ends if the study is killed."""
    import torch

    place = places.get()
    torch.set_num_threads(1)
    count = torch.cuda.device_count()
    if count:
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu(place, count)
    end_with_parent()
    signal.signal(signal.SIGINT, lambda *_: INTERRUPTED.set())
    allow_interrupts()


def attempt_apart(store: "Store", job: Job) -> Outcome:
    """Attempt a job in a worker's process: only then may Ctrl-C raise an error there, and no job begins after one."""
    if INTERRUPTED.is_set():
        raise Stopped
    waiting = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return attempt(store, job)
    except (Stopped, KeyboardInterrupt):
        INTERRUPTED.set()
        raise
    finally:
        signal.signal(signal.SIGINT, waiting)


def own_gpu(place: int, count: int) -> str:
    """Return the name of a worker's GPU, one of the user's CUDA_VISIBLE_DEVICES, of which the first `count` work."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(count)]
    return names[place % count].strip()
