"""The progress line, which behaves in a terminal, in a log file and in a notebook."""

import math
import shutil
import sys
import time
from typing import TextIO


class Progress:
    """One line on a terminal or in a notebook that is written over; in a log file a new line every `seconds`."""

    def __init__(self, seconds: float, *, quiet: bool = False, stream: TextIO | None = None):
        self.seconds, self.quiet = seconds, quiet
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


class Clock:
    """Steps per second of this process, evaluations and saves left out."""

    def __init__(self, step: int):
        self.step, self.time = step, time.perf_counter()
        self.speed = math.nan

    def steps_per_second(self, step: int) -> float:
        """Mean since the last call that was at least half a second ago."""
        now = time.perf_counter()
        if now - self.time > 0.5 or math.isnan(self.speed):
            self.speed = (step - self.step) / max(now - self.time, 1e-9)
            self.step, self.time = step, now
        return self.speed

    def skip(self, seconds: float) -> None:
        self.time += seconds
