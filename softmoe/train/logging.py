"""What a run tells: metrics.jsonl, one progress line, and TensorBoard or Weights & Biases where asked for."""

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Protocol, TextIO


class Sink(Protocol):
    """Where metrics go besides metrics.jsonl."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: one JSON object per line, each with its step, in the order of the steps.

    `rewind(step)` drops what a killed run wrote after the checkpoint it resumes from, so that in the end the file is
    that of an uninterrupted run. If the disk is full lines wait in memory and are written when there is room.
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting: list[str] = []

    def rewind(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                if json.loads(line)["step"] > step:
                    break
            except (json.JSONDecodeError, KeyError, TypeError):
                break  # the line a kill cut short, always the last
            kept.append(line + "\n")
        beside = self.path.with_suffix(".tmp")
        beside.write_text("".join(kept))
        os.replace(beside, self.path)

    def write(self, record: dict[str, Any]) -> str | None:
        """Append one line; returns the reason if it had to wait."""
        self._waiting.append(json.dumps(finite(record)) + "\n")
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write("".join(self._waiting))
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, before)
            return str(error)
        self._waiting = []
        return None

    def flush(self) -> None:
        """On the disk for certain, before a checkpoint says that this step was reached."""
        if self.path.exists():
            with self.path.open("rb+") as file:
                os.fsync(file.fileno())


def finite(value: Any) -> Any:
    """JSON has no NaN: such numbers become null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that is being written is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Progress:
    """One line on a terminal or in a notebook that is written over; in a log file a new line every `seconds`."""

    def __init__(self, steps: int, seconds: float, *, quiet: bool = False, stream: TextIO | None = None):
        self.steps, self.seconds, self.quiet = steps, seconds, quiet
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty() or in_notebook()
        self._next = 0.0
        self._shown = 0

    def due(self) -> bool:
        return not self.quiet and time.monotonic() >= self._next

    def show(self, line: str) -> None:
        self._next = time.monotonic() + (0.25 if self.live else self.seconds)
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write("\r" + line[:width].ljust(self._shown))
            self._shown = min(len(line), width)
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def report(self, message: str) -> None:
        """A line that stays."""
        if self.live and self._shown:
            self.stream.write("\r" + " " * self._shown + "\r")
            self._shown = 0
        self.stream.write(message + "\n")
        self.stream.flush()

    def close(self) -> None:
        if self.live and self._shown:
            self.stream.write("\n")
            self._shown = 0
            self.stream.flush()


def progress_line(
    step: int, steps: int, loss: float, rate: float, images_per_second: float, peak_share: float | None, left: float
) -> str:
    share = "" if peak_share is None else f" | {peak_share:.0%} of peak"
    speed = f"{images_per_second:,.0f}" if images_per_second >= 100 else f"{images_per_second:.1f}"
    return (
        f"step {step:>{len(str(steps))}}/{steps} | loss {loss:.4f} | lr {rate:.2e} | {speed} images/s{share} | "
        f"{duration(left)} left"
    )


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell else None
    return type(running).__name__ == "ZMQInteractiveShell"
