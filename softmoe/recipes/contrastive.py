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

from softmoe import train
from softmoe.data import TransformConfig


def recipe() -> train.TrainConfig:
    return train.TrainConfig(
        steps=750_000,
        model=train.ModelSection(name="soft_b16_128e"),
        text=train.TextSection(size="b", length=16, vocab_size=32_000),
        data=train.DataSection(
            train="wds:laion-{split}.tar",
            batch_size=16_384,
            workers=16,
            transform=TransformConfig(image_size=256, crop="inception", flip=False),
        ),
        optim=train.OptimSection(kernel_decay=0.1, scale_decay=0.0, clip_norm=1.0),
        schedule=train.ScheduleSection(kind="rsqrt", peak=1e-3, warmup=20_000, timescale=10_000, cooldown=20_000),
        objective=train.ObjectiveSection(loss="sigmoid"),
        evaluation=train.EvaluationSection(every=10_000, examples=16_384),
        checkpoint=train.CheckpointSection(every=1000, keep_last=2, keep_every=50_000),
        log=train.LogSection(every=250),
        precision="bfloat16",
    )
