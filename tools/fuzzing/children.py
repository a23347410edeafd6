"""Inputs run in child processes with bounds on memory and time, and what happens is told apart.

A child is long-lived and has a limit on its address space; a watchdog kills it when an input takes too long.
"""

import faulthandler
import multiprocessing.connection
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing.cases import Wrong
from fuzzing.sets import find_set

PACKAGE = Path(__file__).parents[2] / "softmoe"

ADDRESS_SPACE = 6 << 30  # bytes that a child may map beyond what it had when it began
START_SECONDS = 600  # for imports and the good inputs
PATIENCE = 300  # seconds by the clock for an input that uses no processor time: it waits, or the machine is busy


@dataclass
class Outcome:
    kind: str
    said: str = ""
    place: str = ""
    """Where in the code, so that equal defects are counted together."""

    @property
    def defect(self) -> bool:
        return self.kind not in ("right", "sentence")


def generator(seed: int, name: str, index: int) -> random.Random:
    return random.Random(f"{seed}/{name}/{index}")


def memory(key: str) -> int:
    """VmRSS, VmHWM or VmSize of this process in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key + ":"))


def attempt(tried: Any, case: Any, prepared: Any) -> Outcome:
    """Run one input here and say what came of it."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None, prefix="softmoe-fuzz-"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before = memory("VmRSS")
    try:
        outcome = Outcome(tried.run(case, folder, prepared))
    except Exception as error:
        outcome = judged(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    grown = (memory("VmHWM") - before) >> 20
    if grown > tried.megabytes and not outcome.defect:
        return Outcome("memory", f"{grown} MB more than before, then: {outcome.kind} {outcome.said}", "memory")
    return outcome


def judged(error: Exception) -> Outcome:
    said = str(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(PACKAGE)]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    if isinstance(error, Wrong):
        return Outcome("wrong", said, f"{place} {said[:40]}")
    clear = isinstance(error, (ValueError, OSError)) and not isinstance(error, UnicodeError)
    if clear and said and "\n" not in said and len(said) < 10_000:
        return Outcome("sentence", said)
    text = "".join(traceback.format_exception(error))
    return Outcome("traceback", text[-4000:], f"{place} {type(error).__name__}")


def serve_inputs(link: multiprocessing.connection.Connection, name: str, seed: int, work: str) -> None:
    """A child: gets (first, number) and answers (index, outcome) for each, announcing an input before it begins."""
    faulthandler.enable()
    tried = find_set(name)
    prepared = tried.prepare(Path(work))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = memory("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    link.send(("ready", tried.seconds))
    while (span := link.recv()) is not None:
        for index in range(*span):
            link.send(("begin", index))
            case = tried.make(generator(seed, name, index), prepared)
            link.send(("end", index, attempt(tried, case, prepared)))
        link.send(("idle",))
    process = getattr(prepared, "process", None)
    if process is not None:
        process.kill()


class Child:
    """A child process from the parent's side."""

    def __init__(self, context: Any, name: str, seed: int, work: Path):
        self.name, self.index, self.made, self.before = name, -1, 0, 0.0
        self.span: tuple[int, int] | None = None
        self.limit, self.deadline = START_SECONDS, time.monotonic() + START_SECONDS
        self.link, other = context.Pipe()
        self.process = context.Process(target=serve_inputs, args=(other, name, seed, str(work)), daemon=False)
        self.process.start()
        other.close()

    def give(self, span: tuple[int, int] | None) -> None:
        self.span, self.deadline = span, time.monotonic() + self.limit
        self.link.send(span)

    def results(self) -> Iterator[tuple[int, Outcome]]:
        """What the child has finished since; its end or its silence are results as well."""
        try:
            while self.link.poll():
                message = self.link.recv()
                if message[0] == "ready":
                    self.limit = message[1]
                    self.span = None
                elif message[0] == "begin":
                    self.index, self.deadline = message[1], time.monotonic() + self.limit
                    self.before = self.used(whole=True)
                elif message[0] == "end":
                    self.made += 1
                    self.deadline = time.monotonic() + self.limit
                    yield message[1], message[2]
                    self.index = -1
                else:
                    self.span = None
        except (EOFError, ConnectionError):
            self.process.join()
            if self.index < 0:
                raise RuntimeError(f"a child of the set {self.name} cannot begin; see its words above") from None
            number = -(self.process.exitcode or 0)
            name = signal.Signals(number).name if number > 0 else f"exit code {-number}"
            yield self.index, Outcome("crash", name, name)
            return
        late = time.monotonic() > self.deadline and (
            self.used() > self.limit or time.monotonic() > self.deadline + PATIENCE
        )
        if self.span is not None and late:
            index, seconds = self.index, self.limit
            self.end()
            yield index, Outcome("hang", f"no result after {seconds:g} seconds", "hang")

    def used(self, whole: bool = False) -> float:
        """Processor seconds since the input began: on a busy machine the clock says little."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds if whole else seconds - self.before

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
