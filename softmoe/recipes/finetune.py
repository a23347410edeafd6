"""Fine-tune a trained model on other classes, at any image size: a new head, positions resampled, slots kept.

    softmoe finetune MODEL DATA --image-size 384
    softmoe finetune MODEL DATA --optim.name adamw --optim.layer-decay 0.75 --schedule.peak 1e-4
    softmoe train finetune --data.train shapes?size=48        the same settings without a model to start from

The settings are those of the original ViT and of V-MoE: SGD with momentum, no weight decay, a cosine to almost zero,
gradients cut at 10. They used 512 to 1024 images a step and 10 to 20 thousand steps for ImageNet at 384 pixels; here it
is a data set of some ten thousand images.

Time: three times the forward FLOPs per image, see `--dry-run`.
Measured: Imagenette at 96 pixels, 300 steps of 64, from models of Tiny-ImageNet at 64: top-1 54.7 % Soft MoE, 51.1 %
dense (2 cores of an AMD EPYC, 2026-11-16, one seed). Not run on ImageNet.
"""

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


def recipe() -> TrainConfig:
    return TrainConfig(
        steps=2000,
        model=ModelSection(name="soft_s16_128e"),
        data=DataSection(
            train="shapes?size=32",
            batch_size=128,
            transform=TransformConfig(image_size=224, crop="inception", min_area=0.2, flip=True),
        ),
        optim=OptimSection(name="sgd", momentum=0.9, head_decay=0.0, kernel_decay=0.0, scale_decay=0.0, clip_norm=10.0),
        schedule=ScheduleSection(kind="cosine", peak=0.01, warmup=100, end=1e-5),
        evaluation=EvaluationSection(every=500),
        checkpoint=CheckpointSection(every=500),
        log=LogSection(every=25),
    )


def tiny() -> TrainConfig:
    """Two steps of a model that is hardly one, for tests."""
    return shrunk(recipe(), image_size=32)
