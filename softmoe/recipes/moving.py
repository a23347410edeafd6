"""The model of `quickstart` on characters that stand anywhere in the picture, in any size: where only content can tell.

    softmoe train moving
    softmoe train moving --model.combine-place True                                 places that count in combine too
    softmoe train moving --model.frame False                                        places in the picture itself
    softmoe train moving --model.num-experts 1 --model.slots-per-expert 16          one expert, the same slots
    softmoe train moving --model.router identity                                    an expert for each place, no mixing
    softmoe fewshot runs/moving "characters?classes=downstream&scene=moving"
    softmoe study controls --recipe moving --transfer "characters?classes=downstream&scene=moving"

Experts stand in the last two of three blocks. An expert for each place of the picture sees another part of each
character here; in the frame that the router finds in each picture (docs/concepts/places.md) it sees the same part.

Time: 11.8 ms a step of one core of an AMD EPYC (AVX-512), 35 s for all; Identity 10.9, the dense twin 8.3.
Measured: top-1 86.0 %, 10-shot on 100 other classes 86.5 %; four experts 78.8 and 79.4 %, one 60.9 and 65.9 %; Identity
74.4 and 72.9 %; dense with 1.2 times the FLOPs at the best of three rates 63.0 and 66.0 % (2026-11-18, mean of three
seeds). Above Identity by 11.6 ± 3.4 points, 10-shot 13.5 ± 5.6, in equal time (3,220 steps of Identity, six other
seeds) by 7.7 ± 2.8 and 9.0 ± 3.2. Places that count in combine too have 83.0 and 82.3 %. The leads shrink
in longer runs (docs/concepts/experts.md).
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
