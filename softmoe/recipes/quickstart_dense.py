"""The dense twin of `quickstart`: the same transformer with MLPs where the experts were, at equal FLOPs.

    softmoe train quickstart_dense

Time: about two minutes on 2 cores. Expected result: see docs/experiments.md.
"""

from dataclasses import replace

from softmoe.recipes import quickstart
from softmoe.train import TrainConfig


def recipe() -> TrainConfig:
    return dense(quickstart.recipe())


def tiny() -> TrainConfig:
    return dense(quickstart.tiny())


def dense(config: TrainConfig) -> TrainConfig:
    return replace(config, model=replace(config.model, router="dense"))
