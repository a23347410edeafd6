"""Requests that come one by one are answered in batches, and counted.

A thread takes what waits, up to a full batch; if less than that waits, it gives others a moment to come. No more may
wait than can be answered in time: whoever comes beyond that is told so at once.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # upper ends of the histogram
ENDING = 2.5  # seconds that requests under way have when the service is told to end
Question = TypeVar("Question")
Reply = TypeVar("Reply")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of a service on number, size and time."""

    max_batch: int = 8
    """Images that are answered together."""
    max_wait_ms: float = 5.0
    """How long a batch waits for others to fill it."""
    max_waiting: int | None = None
    """Requests that may wait, beyond which the answer is 503; four batches if not given."""
    max_bytes: int = 10_000_000
    """Largest request."""
    max_held_bytes: int = 64_000_000
    """Bytes of all requests that are not decoded yet; beyond it the largest that still come are given up (408, 503)."""
    max_connections: int = 512
    """Connections, or fewer if the limit of open files is low; the longest idle one makes room for a new one."""
    timeout: float = 30.0
    """Seconds for a request."""
    header_seconds: float = 10.0
    """Seconds for the headers of a request; then 408."""
    body_idle_seconds: float = 5.0
    """Seconds between two pieces of a body; then 408."""
    keep_alive_seconds: float = 15.0
    """Seconds that a connection is kept without a request."""

    @property
    def most_waiting(self) -> int:
        return 4 * self.max_batch if self.max_waiting is None else self.max_waiting

    def __post_init__(self) -> None:
        for field in fields(Limits):
            value = getattr(self, field.name)
            if value is not None and (value < 0 if field.name == "max_wait_ms" else value <= 0):
                raise ValueError(f"{field.name} must be above 0, got {value}")
        if self.max_held_bytes < self.max_bytes:
            raise ValueError(f"max_held_bytes must be at least max_bytes, got {self.max_held_bytes}, {self.max_bytes}")


class Overloaded(Exception):
    """Raised where as many requests wait as may wait."""


class Closed(Exception):
    """Raised for requests that come while the service is ending."""


class Batcher(Generic[Question, Reply]):
    """One thread calls `answer` with up to a full batch of questions; it returns as many replies."""

    def __init__(self, answer: Callable[[list[Question]], Sequence[Reply]], limits: Limits):
        self.answer, self.limits = answer, limits
        self.batches, self.images = 0, 0
        self._waiting: deque[tuple[Question, Future[Reply]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="softmoe-batches", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, question: Question) -> "Future[Reply]":
        """Promise the reply. A question that is cancelled before its batch begins costs nothing."""
        future: Future[Reply] = Future()
        with self._changed:
            if self._closed:
                raise Closed
            if len(self._waiting) >= self.limits.most_waiting:
                self._waiting = deque(pair for pair in self._waiting if not pair[1].cancelled())
            if len(self._waiting) >= self.limits.most_waiting:
                raise Overloaded
            self._waiting.append((question, future))
            self._changed.notify()
        return future

    def close(self, timeout: float | None = None) -> bool:
        """Answer what waits, take no more, and end the thread; False if it has not ended after `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while batch := self._next():
            questions, futures = zip(*batch, strict=True)
            try:
                replies = self.answer(list(questions))
                assert len(replies) == len(futures), "one reply for each question"
            except BaseException as error:  # the thread must live on: the error belongs to these requests
                for future in futures:
                    future.set_exception(error)
                continue
            self.batches += 1
            self.images += len(futures)
            for future, reply in zip(futures, replies, strict=True):
                future.set_result(reply)

    def _next(self) -> list[tuple[Question, "Future[Reply]"]]:
        """Wait for the next batch; empty when all is done."""
        batch: list[tuple[Any, Future[Any]]] = []
        with self._changed:
            while not batch:
                while not self._waiting:
                    if self._closed:
                        return []
                    self._changed.wait()
                until = time.monotonic() + self.limits.max_wait_ms / 1e3
                while len(self._waiting) < self.limits.max_batch and not self._closed:
                    if (left := until - time.monotonic()) <= 0:
                        break
                    self._changed.wait(left)
                while self._waiting and len(batch) < self.limits.max_batch:
                    question, future = self._waiting.popleft()
                    if future.set_running_or_notify_cancel():
                        batch.append((question, future))
        return batch


class Metrics:
    """Counts requests by path and status, and how long they took, in the text format of Prometheus."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets = [0] * len(SECONDS)
        self._sum, self._count = 0.0, 0

    def add(self, path: str, status: int, seconds: float) -> None:
        self._requests[path, status] += 1
        if status != 200:
            return
        self._sum += seconds
        self._count += 1
        for index, limit in enumerate(SECONDS):
            self._buckets[index] += seconds <= limit

    def text(self, gauges: Mapping[str, float], counters: Mapping[str, float]) -> str:
        """Return all counts as text, with values that others keep."""
        lines = ["# TYPE softmoe_requests_total counter"]
        for (path, status), count in sorted(self._requests.items()):
            lines.append(f'softmoe_requests_total{{path="{path}",status="{status}"}} {count}')
        lines.append("# TYPE softmoe_request_seconds histogram")
        for limit, count in zip(SECONDS, self._buckets, strict=True):
            lines.append(f'softmoe_request_seconds_bucket{{le="{limit}"}} {count}')
        lines.append(f'softmoe_request_seconds_bucket{{le="+Inf"}} {self._count}')
        lines += [f"softmoe_request_seconds_sum {self._sum}", f"softmoe_request_seconds_count {self._count}"]
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                lines += [f"# TYPE softmoe_{name} {kind}", f"softmoe_{name} {value}"]
        return "\n".join(lines) + "\n"
