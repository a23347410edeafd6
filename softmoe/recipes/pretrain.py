"""The paper's pre-training (Soft MoE S/16, 128 experts, sigmoid loss, reciprocal square root schedule) on any source.

    softmoe train pretrain --data.train "wds:/data/train-{00000..01023}.tar" --data.val "wds:/data/val-{00..07}.tar"
    softmoe train runs/pretrain/checkpoints/step_00050000 --cooldown 50000      a shorter budget from the same run

The paper: batch 4096 of JFT-4B, 300k steps for the Pareto runs with 50k of cooldown, 4M for the long ones; one
checkpoint in 50k is kept to branch from.

Time: 300k steps of S/16 are 3.2e19 FLOPs, days on a node of accelerators.
Measured: not run.
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
    ObjectiveSection,
    OptimSection,
    ScheduleSection,
    TrainConfig,
)


def recipe() -> TrainConfig:
    return TrainConfig(
        steps=300_000,
        model=ModelSection(name="soft_s16_128e"),
        data=DataSection(
            train="shapes?size=224",
            batch_size=4096,
            workers=8,
            transform=TransformConfig(image_size=224, crop="inception", flip=True),
        ),
        optim=OptimSection(head_decay=3.0, kernel_decay=0.03, scale_decay=0.03, clip_norm=1.0),
        schedule=ScheduleSection(kind="rsqrt", peak=1e-3, warmup=10_000, timescale=10_000, cooldown=50_000),
        objective=ObjectiveSection(loss="sigmoid"),
        evaluation=EvaluationSection(every=1000, examples=16_384),
        checkpoint=CheckpointSection(every=1000, keep_last=2, keep_every=50_000),
        log=LogSection(every=250),
        precision="bfloat16",
    )


def tiny() -> TrainConfig:
    """Two steps of a model that is hardly one, for tests."""
    config = shrunk(recipe(), image_size=32)
    return replace(config, data=replace(config.data, train="shapes?size=32"))
