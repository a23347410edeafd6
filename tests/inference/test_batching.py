"""Requests are answered in batches, none is lost, and no more may wait than is allowed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from softmoe.inference.batching import Batcher, Closed, Limits, Overloaded


class Gate:
    """An `answer` that waits until it is opened, and notes its batches."""

    def __init__(self, opened: bool = False):
        self.open = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[int]] = []
        if opened:
            self.open.set()

    def __call__(self, questions: list[int]) -> list[int]:
        self.batches.append(questions)
        self.entered.set()
        self.open.wait()
        return [2 * q for q in questions]


def test_every_question_has_its_own_answer():
    """From many threads at once, in batches no larger than allowed."""
    gate = Gate(opened=True)
    batcher = Batcher(gate, Limits(max_batch=4, max_wait_ms=1.0, max_waiting=1000))
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda q: batcher.submit(q).result(), range(200)))
    batcher.close()
    assert replies == [2 * q for q in range(200)]
    assert max(map(len, gate.batches)) <= 4
    assert sorted(q for batch in gate.batches for q in batch) == list(range(200))
    assert (batcher.images, batcher.batches) == (200, len(gate.batches))


def test_what_waits_is_taken_together():
    """While one batch is at work the next fills up."""
    gate = Gate()
    batcher = Batcher(gate, Limits(max_batch=4, max_wait_ms=0.0, max_waiting=6))
    first = batcher.submit(0)
    gate.entered.wait()
    rest = [batcher.submit(q) for q in range(1, 7)]
    with pytest.raises(Overloaded):
        batcher.submit(7)
    assert batcher.waiting == 6
    gate.open.set()
    assert [f.result() for f in (first, *rest)] == [0, 2, 4, 6, 8, 10, 12]
    assert gate.batches == [[0], [1, 2, 3, 4], [5, 6]]
    batcher.close()


def test_cancelled_questions_are_not_asked():
    """Who gave up waiting costs nothing."""
    gate = Gate()
    batcher = Batcher(gate, Limits(max_batch=4, max_wait_ms=0.0, max_waiting=6))
    batcher.submit(0)
    gate.entered.wait()
    futures = [batcher.submit(q) for q in (1, 2, 3)]
    assert futures[1].cancel()
    gate.open.set()
    batcher.close()
    assert gate.batches == [[0], [1, 3]]


def test_errors_belong_to_their_batch():
    """A batch that fails does not end the service."""

    def answer(questions: list[int]) -> list[int]:
        if 13 in questions:
            raise RuntimeError("unlucky")
        return questions

    batcher = Batcher(answer, Limits(max_batch=1, max_wait_ms=0.0, max_waiting=10))
    bad, good = batcher.submit(13), batcher.submit(1)
    with pytest.raises(RuntimeError, match="unlucky"):
        bad.result()
    assert good.result() == 1
    batcher.close()


def test_closing_answers_what_waits():
    """Nothing is dropped at the end; afterwards nothing is taken."""
    gate = Gate()
    batcher = Batcher(gate, Limits(max_batch=2, max_wait_ms=60_000.0, max_waiting=10))
    futures = [batcher.submit(q) for q in range(5)]
    gate.open.set()
    batcher.close()
    assert [f.result() for f in futures] == [0, 2, 4, 6, 8]
    with pytest.raises(Closed):
        batcher.submit(1)


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_waiting": 0}, {"max_wait_ms": -1.0}])
def test_mistakes(wrong):
    """Limits that make no sense are refused."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)
