"""The settings of a run's checkpoints, apart from those who keep them: this file loads without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointSection:
    """The settings of saving: how often, and which checkpoints are kept."""

    every: int = 1000
    keep_last: int = 2
    keep_every: int | None = None
    """Checkpoints of every multiple of this many steps are kept as well, to branch from."""
    keep_best: bool = True
    asynchronous: bool = True
    """Write in the background, from a copy in memory."""
