"""A run in words, before it runs: settings, cost and memory."""

from softmoe.budget import cost
from softmoe.data import open_source
from softmoe.models import ViTConfig
from softmoe.train.config import TrainConfig
from softmoe.train.strict import flatten


def describe_run(config: TrainConfig) -> str:
    config.check()
    source = open_source(config.data.train, config.data.train_split)
    shape = config.model.resolve(len(source.classes), config.data.transform.image_size)
    settings = [f"  {key} = {value}" for key, value in flatten(config.to_dict()).items() if value is not None]
    price = cost(shape)
    images = config.steps * config.data.batch_size
    return "\n".join(
        [
            "settings",
            *settings,
            "model",
            *(f"  {key} = {value}" for key, value in flatten(shape.to_dict()).items()),
            "data",
            f"  {len(source)} training images of {len(source.classes)} classes; {images} are seen, "
            f"{images / len(source):.2f} epochs",
            "cost",
            f"  {price.params:,} parameters, {price.forward_flops / 1e9:.3f} GFLOPs forward and "
            f"{price.train_flops / 1e9:.3f} GFLOPs training per image",
            f"  {price.train_flops * images:.3e} FLOPs in all",
            "memory, about",
            *(f"  {name:<24}{size / 2**20:10.1f} MiB" for name, size in memory(config, shape, price.params).items()),
        ]
    )


def memory(config: TrainConfig, shape: ViTConfig, params: int) -> dict[str, float]:
    """Bytes by kind. Activations are the tensors a backward pass needs, block by block."""
    copies = {"adamw": 2, "sgd": 1}[config.optim.name]
    sizes = {
        "weights": 4.0 * params,
        "gradients": 4.0 * params,
        "optimizer": 4.0 * params * copies,
        "average": 4.0 * params if config.ema is not None else 0.0,
        "activations": activations(config, shape),
    }
    return sizes | {"sum": sum(sizes.values())}


def activations(config: TrainConfig, shape: ViTConfig) -> float:
    B, M, D, H = config.data.batch_size // config.accumulate, shape.tokens, shape.width, shape.mlp_dim
    width = 2 if config.precision == "bfloat16" else 4
    block = M * (10 * D + 2 * H) * width
    routing = 0.0
    if shape.moe:
        slots = shape.moe.num_experts * shape.moe.slots_per_expert
        routing = len(shape.moe_blocks) * (3 * M * slots + 4 * slots * D) * 4.0
    if config.gradient_checkpointing:
        return B * (shape.depth * M * D * width + block + routing / max(1, len(shape.moe_blocks)))
    return B * (shape.depth * block + routing)
