"""A small Soft MoE on `characters`: a thousand classes drawn from fonts, more than a model this narrow can know.

    softmoe train characters
    softmoe train characters --model.router dense
    softmoe train characters --model.num-experts 1 --model.slots-per-expert 16      one expert, the same slots
    softmoe train characters --model.router identity
    softmoe train characters --model.router placed                                  ours: slots with a place
    softmoe fewshot runs/characters "characters?classes=downstream"
    softmoe study controls --recipe characters --transfer "characters?classes=downstream"

Experts stand in the last block only, where tokens are no longer needed in detail, start identical, and have as many
slots as there are tokens: a step costs what a dense one costs, and what differs is the number of parameters. All of the
commands above train for equally many steps.

Time: 30 to 35 ms of processor time a step on one core of an AMD EPYC that others used too, about 100 s for all.
Measured: top-1 55.9 %, 10-shot 63.0 %; dense 46.3 and 53.9 %; with a place 86.1 and 86.3 % (2026-11-16, one seed; the
one-expert and Identity controls are not run yet); see docs/experiments.md.
"""

from dataclasses import replace

from softmoe.data import TransformConfig
from softmoe.recipes import shrunk
from softmoe.train import (
    CheckpointSection,
    DataSection,
    EvaluationSection,
    LogSection,
    ModelSection,
    OptimSection,
    ScheduleSection,
    TrainConfig,
)

IMAGE = 32


def recipe() -> TrainConfig:
    return TrainConfig(
        steps=3000,
        model=ModelSection(
            name="soft_ti8_16e",
            width=24,
            depth=3,
            heads=3,
            mlp_dim=96,
            blocks=(2,),
            identical_init=True,
            options={"scale_init": 6.0},
        ),
        data=DataSection(
            train=f"characters?size={IMAGE}&classes=1000",
            batch_size=64,
            workers=0,  # drawing a batch takes less than handing one over
            transform=TransformConfig(image_size=IMAGE, crop="resize", flip=False),
        ),
        optim=OptimSection(head_decay=0.05, kernel_decay=0.05, scale_decay=0.0, beta2=0.99),
        schedule=ScheduleSection(kind="cosine", peak=8e-3, warmup=200),
        evaluation=EvaluationSection(every=1000, examples=5000),
        checkpoint=CheckpointSection(every=1000),
        log=LogSection(every=50),
    )


def tiny() -> TrainConfig:
    """Two steps of a model that is hardly one, for tests."""
    config = shrunk(recipe(), IMAGE)
    return replace(config, data=replace(config.data, train=f"characters?size={IMAGE}&classes=20"))
