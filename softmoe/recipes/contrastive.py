"""The paper's image-text training from scratch (appendix, LAION-400M): Soft MoE B/16, sigmoid loss, any pairs.

    softmoe train contrastive --data.train "wds:/data/{split}-{00000..41408}.tar?order=shards" --data.workers 16
    softmoe train contrastive ... --model.router dense --data.transform.crop resize       the paper's dense twin
    softmoe zeroshot runs/contrastive folder:/data/imagenet

Parts of an example: KEY.jpg and KEY.txt (captions, one a line; one of them is drawn each time) or KEY.json with a
"caption". The paper: batch 16,384 at 256 pixels, 750k steps, 275 million pairs, captions of 16 tokens of C4's
SentencePiece (--text.tokenizer FILE); inception crops for Soft MoE, plain resizing for the others, which augmentation
made worse. --accumulate computes the batch in parts, with the gradient of the whole; torchrun spreads it over
processes, and the loss is that of all pairs of all of them.

Time: 750k steps are days on a pod of accelerators.
Measured: not run. `contrastive_quickstart` has figures of the same code on small data.
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
    TextSection,
    TrainConfig,
)


def recipe() -> TrainConfig:
    return TrainConfig(
        steps=750_000,
        model=ModelSection(name="soft_b16_128e"),
        text=TextSection(size="b", length=16, vocab_size=32_000),
        data=DataSection(
            train="wds:laion-{split}.tar",
            batch_size=16_384,
            workers=16,
            transform=TransformConfig(image_size=256, crop="inception", flip=False),
        ),
        optim=OptimSection(kernel_decay=0.1, scale_decay=0.0, clip_norm=1.0),
        schedule=ScheduleSection(kind="rsqrt", peak=1e-3, warmup=20_000, timescale=10_000, cooldown=20_000),
        objective=ObjectiveSection(loss="sigmoid"),
        evaluation=EvaluationSection(every=10_000, examples=16_384),
        checkpoint=CheckpointSection(every=1000, keep_last=2, keep_every=50_000),
        log=LogSection(every=250),
        precision="bfloat16",
    )


def tiny() -> TrainConfig:
    """Two steps of a model that is hardly one, on `shapes`, for tests."""
    config = shrunk(recipe(), image_size=32)
    return replace(config, data=replace(config.data, train="shapes?size=32"))
