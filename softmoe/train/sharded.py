"""The checkpoints of a run of many processes. Each writes its parts; the leader keeps the folder in order."""

from collections.abc import Callable
from pathlib import Path

from softmoe.train.checkpoint import CheckpointStore, Snapshot
from softmoe.train.config import CheckpointSection
from softmoe.train.files import read_json
from softmoe.train.team import Team


def make_store(folder: Path, config: CheckpointSection, report: Callable[[str], None], team: Team) -> CheckpointStore:
    if team.world == 1:
        return CheckpointStore(folder, config, report)
    return ShardedStore(folder, config, report, team)


class ShardedStore(CheckpointStore):
    """All methods but `steps` and `path` are called by all processes, in the same order."""

    def __init__(self, folder: Path, config: CheckpointSection, report: Callable[[str], None], team: Team):
        super().__init__(folder, config, report)
        self.team = team

    def latest(self) -> Snapshot | None:
        """The newest that is whole. Its tensors stay on the disk, for each process to read its own parts."""
        from softmoe.parallel.checkpoint import verify_sharded

        if self.team.leads:
            self.sweep()
        steps = self.team.gather(self.steps())[0]
        for step in reversed(steps):
            folder = self.path(step)
            try:
                verify_sharded(folder, self.team.group)
            except ValueError as error:
                if self.team.leads:
                    self.report(
                        f"broken checkpoint: {error}; put aside as {self._put_aside(step)}, trying the one before"
                    )
                self.team.wait()
                continue
            self.last_good = step
            return Snapshot(step, {}, {path.stem: read_json(path) for path in folder.glob("*.json")})
        if steps:
            raise ValueError(
                f"none of the {len(steps)} checkpoints in {self.folder} can be read (see the lines above): "
                "restore one, or remove the run's folder to start again"
            )
        return None

    def _put(self, snapshot: Snapshot) -> None:
        from softmoe.parallel.checkpoint import write_sharded

        try:
            write_sharded(self.path(snapshot.step), snapshot.step, snapshot.tensors, snapshot.texts, self.team.saving)
        except RuntimeError as error:  # the others are gone; the training will find out too
            raise OSError(str(error).strip().splitlines()[0]) from error

    def _put_in_order(self, step: int, best: int | None) -> None:
        if self.team.leads:
            super()._put_in_order(step, best)
