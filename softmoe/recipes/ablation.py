"""The paper's routing ablation (section 3.6): the same transformer with learned, fixed or no mixing.

    for router in soft uniform_soft soft_uniform uniform identity dense; do
        softmoe train ablation --model.router $router --run-name ablation_$router
    done

Learned dispatch and combine (soft), one of them uniform, both uniform, tokens sent round the experts unmixed
(identity), and no experts at all (dense), at equal FLOPs. Time: as quickstart. Expected result: soft first, identity
and uniform last in the paper; ours: see docs/experiments.md.
"""

from dataclasses import replace

from softmoe.recipes import quickstart
from softmoe.train import TrainConfig


def recipe() -> TrainConfig:
    config = quickstart.recipe()
    return replace(config, steps=2000, schedule=replace(config.schedule, cooldown=400))


def tiny() -> TrainConfig:
    return quickstart.tiny()
