"""Soft MoE on 10 thousand to a million images: 64 px pictures, a small transformer, augmentation against overfitting.

    softmoe train small_data --data.train folder:/data/tiny-imagenet
    softmoe train small_data --data.train folder:/data/tiny-imagenet --model.router dense --run-name small_data_dense

Time: about 0.1 GFLOPs per image. Expected result: see docs/experiments.md.
"""

from dataclasses import replace

from softmoe.data import TransformConfig
from softmoe.recipes.common import shrunk
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
        steps=10_000,
        model=ModelSection(name="soft_ti8_64e", width=128, depth=6, heads=4, mlp_dim=512, expert_dropout=0.1),
        data=DataSection(
            train="folder:data",
            batch_size=128,
            transform=TransformConfig(
                image_size=64, crop="inception", min_area=0.2, flip=True, rand_layers=2, rand_magnitude=10.0, mixup=0.2
            ),
        ),
        optim=OptimSection(head_decay=0.1, kernel_decay=0.1, scale_decay=0.1, clip_norm=1.0),
        schedule=ScheduleSection(kind="cosine", peak=1e-3, warmup=500),
        objective=ObjectiveSection(label_smoothing=0.1),
        evaluation=EvaluationSection(every=1000),
        checkpoint=CheckpointSection(every=500),
        log=LogSection(every=50),
    )


def tiny() -> TrainConfig:
    """Two steps of a model that is hardly one, on `shapes`, for tests."""
    config = shrunk(recipe(), image_size=32)
    return replace(config, data=replace(config.data, train="shapes?size=32"))
