"""metrics.jsonl: the numbers of a run, one JSON object per line."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from softmoe.storage.files import sync_file, write_text


class MetricsFile:
    """metrics.jsonl: one JSON object per line, each with its step, in the order of the steps.

    `rewind(step)` drops what a killed run wrote after the checkpoint it resumes from, so that in the end the file is
    that of an uninterrupted run. If the disk is full lines wait in memory and are written when there is room.
    Without a path nothing is written: of many processes only one keeps the file.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self._waiting: list[str] = []

    def rewind(self, step: int) -> None:
        if self.path is None or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                if json.loads(line)["step"] > step:
                    break
            except (json.JSONDecodeError, KeyError, TypeError):
                break  # the line a kill cut short, always the last
            kept.append(line + "\n")
        write_text(self.path, "".join(kept))

    def write(self, record: dict[str, Any]) -> str | None:
        """Append one line; returns the reason if it had to wait."""
        if self.path is None:
            return None
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
        if self.path is None:
            return
        with suppress(OSError):  # a disk that cannot do this will say so when the checkpoint is written
            sync_file(self.path)


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
