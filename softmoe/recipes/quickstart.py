"""A small Soft MoE on the built-in `shapes`, in a few minutes on two CPU cores.

    softmoe train quickstart
    softmoe train quickstart_dense       the same without experts, at equal FLOPs

Time: about two minutes each on 2 cores. Expected result: see docs/experiments.md.
"""

from softmoe.data import TransformConfig
from softmoe.recipes.common import shrunk
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

IMAGE = 48


def recipe() -> TrainConfig:
    return TrainConfig(
        steps=1000,
        model=ModelSection(name="soft_ti8_36e", width=96, depth=6, heads=3, mlp_dim=384, patch_size=8, num_experts=36),
        data=DataSection(
            train=f"shapes?size={IMAGE}",
            batch_size=64,
            transform=TransformConfig(image_size=IMAGE, crop="resize", flip=False),
        ),
        optim=OptimSection(head_decay=0.03, kernel_decay=0.03),
        schedule=ScheduleSection(kind="rsqrt", peak=1e-3, warmup=100, timescale=1000, cooldown=200),
        evaluation=EvaluationSection(every=250, examples=2080),
        checkpoint=CheckpointSection(every=250),
        log=LogSection(every=25),
    )


def tiny() -> TrainConfig:
    """Two steps of a model that is hardly one, for tests."""
    return shrunk(recipe(), IMAGE)
