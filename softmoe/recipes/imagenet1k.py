"""Soft MoE S/16 from scratch on ImageNet-1k: strong augmentation, 300 epochs.

    softmoe train imagenet1k --data.train folder:/data/imagenet

/data/imagenet has train/<class>/*.JPEG and val/<class>/*.JPEG. The settings are those of the reference code's
from-scratch ImageNet run (batch scaled to 1024, linear decay, weight decay 0.1, RandAugment 2/10, mixup 0.2, dropout
0.2 in the experts only).

Time: 375k steps, days on one accelerator.
Measured: not run.
"""

from softmoe import train
from softmoe.data import TransformConfig

IMAGES, EPOCHS, BATCH = 1_281_167, 300, 1024


def recipe() -> train.TrainConfig:
    return train.TrainConfig(
        steps=-(-EPOCHS * IMAGES // BATCH),
        model=train.ModelSection(name="soft_s16_128e", expert_dropout=0.2),
        data=train.DataSection(
            train="folder:imagenet",
            batch_size=BATCH,
            workers=8,
            transform=TransformConfig(
                image_size=224, crop="inception", flip=True, rand_layers=2, rand_magnitude=10.0, mixup=0.2
            ),
        ),
        optim=train.OptimSection(head_decay=0.1, kernel_decay=0.1, scale_decay=0.1, clip_norm=1.0),
        schedule=train.ScheduleSection(kind="linear", peak=1e-3, warmup=10_000, end=1e-5),
        evaluation=train.EvaluationSection(every=5000),
        checkpoint=train.CheckpointSection(every=1000, keep_last=2),
        log=train.LogSection(every=250),
        precision="bfloat16",
    )
