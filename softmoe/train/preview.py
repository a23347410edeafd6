"""A run in words, before it runs: settings, cost and memory."""

from softmoe.budget import cost, memory, text_cost, training_flops
from softmoe.models import ViTConfig
from softmoe.models.two_tower import features_dim
from softmoe.storage.files import flatten
from softmoe.train.config import TrainConfig
from softmoe.train.data import buffers_of, open_sources


def preview(config: TrainConfig) -> str:
    """What `train --dry-run` prints. ValueError for settings that cannot work."""
    config.check()
    source, held_out = open_sources(config)
    texts = config.text.size is not None
    shape = config.model.resolve(None if texts else len(source.classes) or None, config.data.transform.image_size)
    towers = config.text.resolve(shape, config.text.vocab_size) if texts else None
    price = cost(shape)
    images = config.steps * config.data.batch_size
    seen = f"{images:,} are seen, {images / len(source):.2f} epochs"
    checked = min(len(held_out), config.evaluation.examples or len(held_out))
    gigaflops = f"{price.forward_flops / 1e9:.3f} GFLOPs forward and {price.train_flops / 1e9:.3f} GFLOPs training"
    lines = [f"  {price.params:,} parameters, {gigaflops} per image"]
    if towers is not None:
        text = text_cost(towers.text, towers.embed_dim or features_dim(towers))
        lines.append(f"  text tower: {text.params:,} parameters, {text.train_flops / 1e9:.3f} GFLOPs training per text")
    flops = training_flops(towers or shape, locked=config.model.locked) * images
    return "\n".join(
        [
            "settings (those that are None are left out)",
            *table(config.to_dict()),
            "model",
            *table((towers or shape).to_dict()),
            "data",
            f"  {len(source):,} training images of {len(source.classes)} classes; {seen}",
            f"  {len(held_out):,} validation images, of which {checked:,} are evaluated",
            f"  {waiting(config)}",
            "cost",
            *lines,
            f"  {flops:.3e} FLOPs in all",
            "memory, about" if towers is None else "memory, about, of the image tower",
            *(f"  {name:<16}{size / 2**20:10,.1f} MiB" for name, size in memory_needed(config, shape).items()),
        ]
    )


def waiting(config: TrainConfig) -> str:
    """How much memory the batches take that wait for the device, at most."""
    b = buffers_of(config.data, config.data.batch_size, "cuda" if on_cuda(config) else "cpu")
    kind = "pinned uint8" if on_cuda(config) else "float32"
    ahead = f"{b.workers} workers, {b.prefetch} batches ahead of each" if b.workers else "made in this process"
    return f"batches of {b.batch_bytes / 2**20:,.1f} MiB ({kind}), {ahead}: at most {b.bytes / 2**20:,.1f} MiB"


def table(values: dict) -> list[str]:
    return [f"  {key} = {value}" for key, value in flatten(values).items() if value is not None]


def on_cuda(config: TrainConfig) -> bool:
    """Whether the run would be on a GPU: by its settings, or, where they leave it open, by what is here."""
    import torch

    return config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())


def memory_needed(config: TrainConfig, shape: ViTConfig) -> dict[str, int]:
    """Bytes by kind."""
    need = memory(
        shape,
        config.data.batch_size // config.accumulate,
        optimizer=config.optim.name,
        activation_bytes=2 if config.precision == "bfloat16" or (config.precision == "auto" and on_cuda(config)) else 4,
        state_bytes=2 if config.optim.states == "bfloat16" else 4,
        in_backward=config.optim.in_backward,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    copies = {"average": need.weights} if config.ema is not None else {}
    if config.checkpoint.asynchronous:
        copies["copy to save"] = need.weights + need.optimizer_state + sum(copies.values())
    return {
        "weights": need.weights,
        "gradients": need.gradients,
        "optimizer": need.optimizer_state,
        "activations": need.activations,
        **copies,
        "sum": need.total + sum(copies.values()),
    }
