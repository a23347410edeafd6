"""The paper's pre-training (Soft MoE S/16, 128 experts, sigmoid loss, reciprocal square root schedule) on any source.

    softmoe train pretrain --data.train "wds:/data/train-{00000..01023}.tar" --data.val "wds:/data/val-{00..07}.tar"
    softmoe train runs/pretrain/checkpoints/step_00050000 --cooldown 50000      a shorter budget from the same run

The paper: batch 4096 of JFT-4B, 300k steps for the Pareto runs with 50k of cooldown, 4M for the long ones; one
checkpoint in 50k is kept to branch from.

Time: 300k steps of S/16 are 3.2e19 FLOPs, days on a node of accelerators.
Measured: not run.
"""

from softmoe import train
from softmoe.data import TransformConfig


def recipe() -> train.TrainConfig:
    return train.TrainConfig(
        steps=300_000,
        model=train.ModelSection(name="soft_s16_128e"),
        data=train.DataSection(
            train="shapes?size=224",
            batch_size=4096,
            workers=8,
            transform=TransformConfig(image_size=224, crop="inception", flip=True),
        ),
        optim=train.OptimSection(head_decay=3.0, kernel_decay=0.03, scale_decay=0.03, clip_norm=1.0),
        schedule=train.ScheduleSection(kind="rsqrt", peak=1e-3, warmup=10_000, timescale=10_000, cooldown=50_000),
        objective=train.ObjectiveSection(loss="sigmoid"),
        evaluation=train.EvaluationSection(every=1000, examples=16_384),
        checkpoint=train.CheckpointSection(every=1000, keep_last=2, keep_every=50_000),
        log=train.LogSection(every=250),
        precision="bfloat16",
    )
