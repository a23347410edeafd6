import errno
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from softmoe.train.log import Clock, MetricsFile, Progress, duration, peak_flops, progress_line, read_metrics
from softmoe.train.reporting import report_starving


def test_rewind_drops_later_steps_and_a_cut_line(tmp_path: Path):
    """After a kill the file holds exactly the lines up to the checkpoint's step."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 2, 3, 4):
        file.write({"step": step, "loss": step / 7})
    before = path.read_text().splitlines(keepends=True)
    with path.open("a") as raw:
        raw.write('{"step": 5, "lo')
    MetricsFile(path).rewind(4)
    assert path.read_text() == "".join(before)
    MetricsFile(path).rewind(2)
    assert path.read_text() == "".join(before[:3])
    MetricsFile(path).rewind(0)
    assert path.read_text() == ""


def test_numbers_come_back_exactly(tmp_path: Path):
    """Floats are written with all their digits; NaN becomes null, which is JSON."""
    path = tmp_path / "metrics.jsonl"
    record = {"step": 1, "loss": 0.1 + 0.2, "routers": {"a": {"scale": 1e-300}}}
    MetricsFile(path).write(record)
    MetricsFile(path).write({"step": 2, "loss": float("nan"), "routers": {"a": float("inf")}})
    assert read_metrics(path) == [record, {"step": 2, "loss": None, "routers": {"a": None}}]


def test_lines_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A line that cannot be written is not lost and leaves no half line."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1})
    real = Path.open

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            with real(path, "a") as half:
                half.write(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda *a, **k: Full())
    assert "No space left" in str(file.write({"step": 2}))
    assert "No space left" in str(file.write({"step": 3}))
    monkeypatch.undo()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
    assert file.write({"step": 4}) is None
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_terminal_is_one_line():
    """Each line covers the one before; a message that stays clears it first."""
    stream = Terminal()
    progress = Progress(10.0, stream=stream)
    progress.show("a long line")
    progress.show("short")
    progress.report("message")
    assert stream.getvalue() == "\ra long line\rshort      \r     \rmessage\n"


def test_progress_in_a_file_is_a_line_every_so_often():
    """No carriage returns, and nothing is due again before the time is over."""
    stream = io.StringIO()
    progress = Progress(1000.0, stream=stream)
    assert progress.due()
    progress.show("one")
    assert not progress.due()
    assert progress.due(tenth=True)
    progress.report("message")
    progress.close()
    assert stream.getvalue() == "one\nmessage\n"
    assert not Progress(0.0, quiet=True, stream=stream).due()


def test_progress_line():
    """Step, loss, learning rate, speed, share of peak and time left."""
    line = progress_line(7, 1000, 2.5, 1e-3, 1234.5, 0.42, 3700.0)
    assert line == "step    7/1000 | loss 2.5000 | lr 1.00e-03 | 1,234 images/s | 42% of peak | 1h01m left"
    assert progress_line(2, 9, 1.0, 0.1, 50.0, 1.0, 7.0).endswith("| 50.0 images/s | 100% of peak | 7s left")
    assert progress_line(2, 9, 1.0, 0.1, 50.0, 1.3, 7.0).endswith("| 50.0 images/s | 7s left")
    assert progress_line(1, 1000, 2.5, 0.0, math.nan, 0.4, math.nan) == "step    1/1000 | loss 2.5000 | lr 0.00e+00"


def test_a_full_device_has_no_peak(monkeypatch: pytest.MonkeyPatch):
    """Where the training has left no memory to measure the peak with, the line says nothing of it."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "mm", full)
    peak = peak_flops.__wrapped__(torch.device("cpu"))
    assert math.isnan(peak)
    assert progress_line(2, 9, 1.0, 0.1, 50.0, 1e9 / peak, 7.0).endswith("| 50.0 images/s | 7s left")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.6, "1m00s"),
        (3599.4, "59m59s"),
        (7260, "2h01m"),
        (172_799, "47h59m"),
        (200_000, "2.3 days"),
        (1e9, "31.7 years"),
        (float("inf"), "?"),
    ],
)
def test_duration(seconds: float, text: str):
    """Rounded to the second before it is split; what takes days is not counted in hours."""
    assert duration(seconds) == text


def test_clock_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch):
    """Ten steps in ten seconds of which five were an evaluation are two steps per second; the start and the first step,
    which waits for workers, do not count."""
    now = [100.0]
    monkeypatch.setattr("softmoe.train.log.time.perf_counter", lambda: now[0])
    clock = Clock()
    now[0] += 60.0
    assert math.isnan(clock.steps_per_second(1))
    clock.begin(1)
    now[0] += 10.0
    clock.skip(5.0)
    clock.begin(11)
    assert clock.steps_per_second(11) == pytest.approx(2.0)


@pytest.mark.parametrize(("starved", "lines"), [(5, 0), (6, 1)])
def test_a_device_that_waits_for_data(starved: int, lines: int) -> None:
    """A line if it waited in most steps since the last line of metrics, and the count begins anew."""
    said: list[str] = []
    feed: Any = SimpleNamespace(starved=starved)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(log=SimpleNamespace(every=10)),
        progress=SimpleNamespace(report=said.append),
        done=SimpleNamespace(step=20),
        data=SimpleNamespace(loader=SimpleNamespace(workers=3)),
    )
    report_starving(run, feed)
    assert len(said) == lines
    assert all("waited for data in 6 of the last 10 steps; raise data.workers (3 now)" in line for line in said)
    assert feed.starved == 0
