"""The paper's routing ablation (section 3.6): the same transformer with learned, fixed or no mixing.

    for router in soft uniform_soft soft_uniform uniform identity dense; do
        softmoe train ablation --model.router $router --run-name ablation_$router
    done

Learned dispatch and combine (soft), one of them uniform, both uniform, tokens sent round the experts unmixed
(identity), and no experts at all (dense). As in the paper there are as many experts as tokens, with one slot each,
and experts in the second half of the blocks. In the paper soft is first, identity and uniform are last.

Time: not measured.
Measured: not run at this length. On Tiny-ImageNet-100 `softmoe study ablations` has
identity first (docs/reproduction.md).
"""

from dataclasses import replace

from softmoe.recipes import quickstart
from softmoe.train import TrainConfig


def recipe() -> TrainConfig:
    config = quickstart.recipe()
    model = replace(config.model, num_experts=64, blocks=None)
    return replace(config, steps=2000, model=model)


def tiny() -> TrainConfig:
    config = quickstart.tiny()
    return replace(config, model=replace(config.model, blocks=None))
