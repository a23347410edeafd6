"""The model of `quickstart` on characters that stand anywhere in the picture, in any size: where only content can tell.

    softmoe train moving
    softmoe train moving --model.frame False                                        places in the picture itself
    softmoe train moving --model.num-experts 1 --model.slots-per-expert 16          one expert, the same slots
    softmoe train moving --model.router identity                                    an expert for each place, no mixing
    softmoe fewshot runs/moving "characters?classes=downstream&scene=moving"
    softmoe study controls --recipe moving --transfer "characters?classes=downstream&scene=moving"

Experts stand in the last two of three blocks. An expert for each place of the picture sees another part of each
character here; in the frame that the router finds in each picture (docs/concepts/places.md) it sees the same part.

Time: 10.1 ms a step of one core of an AMD EPYC (AVX-512), 30 s for all; Identity 9.6, the dense twin 7.5.
Measured: top-1 83.0 %, 10-shot on 100 other classes 82.3 %; four experts 76.1 and 75.5 %, one 56.7 and 62.7 %; Identity
74.4 and 72.9 %; dense with 1.2 times the FLOPs at the best of three rates 63.0 and 66.0 % (2026-11-18, mean of three
seeds). Above Identity by 8.7 ± 7.1 points, 10-shot 9.4 ± 6.4, in equal time (3,150 steps of Identity, six other seeds)
by 5.3 ± 2.3 and 5.6 ± 4.1. Dense gains most from longer training.
"""

from dataclasses import replace

from softmoe.recipes import quickstart, shrunk
from softmoe.train import TrainConfig

STEPS = 3000


def recipe() -> TrainConfig:
    config = quickstart.recipe()
    return replace(
        config,
        steps=STEPS,
        model=replace(config.model, blocks=(1, 2)),
        data=replace(config.data, train=f"{config.data.train}&scene=moving"),
        evaluation=replace(config.evaluation, every=STEPS // 4),
        checkpoint=replace(config.checkpoint, every=STEPS // 2),
    )


def tiny() -> TrainConfig:
    """Shrink the recipe to two steps of a tiny model, for tests."""
    return shrunk(recipe(), quickstart.IMAGE, data=f"characters?size={quickstart.IMAGE}&classes=20&scene=moving")
