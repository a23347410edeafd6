"""Helpers that recipes share."""

from dataclasses import replace

from softmoe.train import EvaluationSection, TrainConfig


def shrunk(config: TrainConfig, image_size: int) -> TrainConfig:
    """Shrink a recipe to two steps of a model that is hardly one; everything else stays as it is."""
    d = config.data
    blocks = None if config.model.blocks is None else (0, 1)
    shape = replace(config.model, width=16, depth=2, heads=2, mlp_dim=32, patch_size=image_size // 4, blocks=blocks)
    text = replace(config.text, width=16, depth=2, heads=2, mlp_dim=32, vocab_size=512)
    return replace(
        config,
        steps=2,
        model=replace(shape, num_experts=None if shape.name.startswith("vit_") else 4),
        text=text,
        data=replace(d, batch_size=8, workers=0, transform=replace(d.transform, image_size=image_size)),
        schedule=replace(config.schedule, warmup=1, cooldown=min(1, config.schedule.cooldown)),
        evaluation=EvaluationSection(every=None, examples=16),
        log=replace(config.log, every=1),
    )
