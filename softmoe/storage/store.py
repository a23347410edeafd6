"""Keep the checkpoints of one run: write them in the background, find the newest whole one, remove the rest."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from softmoe.storage.checkpoint import (
    STEP_NAME,
    BrokenCheckpoint,
    Checkpoint,
    Snapshot,
    read_checkpoint,
    step_name,
    write_checkpoint,
)
from softmoe.storage.checkpoint_section import CheckpointSection
from softmoe.storage.files import PARTIAL, bring_back, first_line, point_link, remove_folder


class CheckpointStore:
    """The checkpoints of one run, written one at a time; `report` gets a line for everything that went wrong.

    With many processes each has a store with the groups `talk` and `saving` (writes run beside the training, so they
    have a group of their own). All of them call each method but `steps` and `path`, in the same order; rank 0 sets the
    links and removes old checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointSection,
        report: Callable[[str], None],
        talk: Any = None,
        saving: Any = None,
    ):
        self.folder, self.config, self.report = folder, config, report
        self.failed_saves = 0
        self.spoiled = False
        """Whether a copy turned out to have weights that are not finite, and was not written."""
        self.last_good: int | None = None
        self._talk, self._saving = talk, saving
        self._leads = talk is None or talk.rank() == 0
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    def steps(self) -> list[int]:
        """Return the steps of the finished checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = (STEP_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def save(self, snapshot: Snapshot, best: int | None = None) -> None:
        """Write in the background (after the write before it, if that still runs), or at once if not asynchronous.

        `best` is the step of the best checkpoint so far, which is kept and gets the link `best`.
        """
        self.wait()
        if not self.config.asynchronous:
            self._write(snapshot, best)
            return
        self._writer = threading.Thread(target=self._write_beside, args=(snapshot, best), name="checkpoint-writer")
        self._writer.start()

    def wait(self) -> None:
        """Wait until the write in the background, if any, is done; raise what it failed with, a full disk excepted."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def latest(self) -> Checkpoint | None:
        """Find the newest checkpoint that is whole. Broken ones are reported and put aside; None for a new run."""
        if self._leads:
            self.sweep()
        steps = self._from_rank_0(self.steps())
        for step in reversed(steps):
            try:
                found = read_checkpoint(self.path(step), self._talk)
            except BrokenCheckpoint as error:
                if self._leads:
                    aside = self._put_aside(step)
                    self.report(f"broken checkpoint: {error}; put aside as {aside}, trying the one before")
                self._from_rank_0(None)  # wait until it is put aside
                continue
            self.last_good = step
            return found
        if steps:
            raise ValueError(
                f"none of the {len(steps)} checkpoints in {self.folder} can be read (see the lines above): "
                "restore one, or remove the run's folder to start again"
            )
        return None

    def sweep(self) -> None:
        """Remove folders that a killed process left half written; one that it was to replace gets its name back."""
        for old in self.folder.glob(f"{PARTIAL}*-old"):
            name = old.name.removeprefix(PARTIAL).rsplit("-", 2)[0]
            if STEP_NAME.fullmatch(name):
                bring_back(self.folder / name)
        for partial in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)

    def _from_rank_0(self, value: Any) -> Any:
        """Return rank 0's value once all ranks have called this."""
        if self._talk is None:
            return value
        from softmoe.storage.shards import gather  # slow to import

        return gather(value, self._talk)[0]

    def _put_aside(self, step: int) -> Path:
        aside = self.folder / f"broken-{step_name(step)}"
        shutil.rmtree(aside, ignore_errors=True)
        return self.path(step).rename(aside)

    def _write_beside(self, snapshot: Snapshot, best: int | None) -> None:
        """Write in a thread, which has nobody to raise to: `wait` does."""
        try:
            self._write(snapshot, best)
        except Exception as error:
            self._failure = error

    def _write(self, snapshot: Snapshot, best: int | None) -> None:
        try:
            self.spoiled = not self._write_if_finite(snapshot)
        except OSError as error:
            self.failed_saves += 1
            kept = "no checkpoint yet" if self.last_good is None else f"the last good one is of step {self.last_good}"
            self.report(f"could not save step {snapshot.step}: {error}; training goes on, {kept}")
            return
        if self.spoiled:
            self.report(f"step {snapshot.step} is not saved: its weights are not finite numbers")
            return
        self.last_good = snapshot.step
        if self._leads:
            self._link_and_prune(snapshot.step, best)

    def _write_if_finite(self, snapshot: Snapshot) -> bool:
        """Write a snapshot; False, and nothing is written, if its weights turn out not to be finite."""
        try:
            if snapshot.ready is not None and not snapshot.ready():
                return False
            write_checkpoint(self.folder, snapshot, self._saving)
            return True
        except RuntimeError as error:
            if self._saving is None:
                raise
            raise OSError(first_line(error)) from error  # the others are gone; training will see it

    def _link_and_prune(self, step: int, best: int | None) -> None:
        try:
            point_link(self.folder / "last", step_name(step))
            if best is not None and best in self.steps():
                point_link(self.folder / "best", step_name(best))
            self._prune(best)
        except OSError as error:
            self.report(f"saved step {step}, but could not put the folder in order: {error}")

    def _prune(self, best: int | None) -> None:
        steps = self.steps()
        keep = set(steps[-self.config.keep_last :])
        if self.config.keep_every:
            keep |= {step for step in steps if step % self.config.keep_every == 0}
        if self.config.keep_best and best is not None:
            keep.add(best)
        for step in set(steps) - keep:
            remove_folder(self.path(step))
