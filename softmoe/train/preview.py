"""Preview the settings, the cost and the memory of a run before it runs."""

from collections.abc import Collection, Mapping

from softmoe.budget import Memory, blocks_to_recompute, cost, memory, text_cost, training_flops
from softmoe.data import Source
from softmoe.machine import memory_of
from softmoe.models import TwoTower, TwoTowerConfig, VisionTransformer, ViTConfig
from softmoe.models.embed import unseen_pixels
from softmoe.models.two_tower import features_dim
from softmoe.storage.settings import flatten
from softmoe.train.config import TrainConfig
from softmoe.train.data import buffers_of, open_sources
from softmoe.train.optim import parameter_groups

MANY_EPOCHS = 1000
MANY_LEARNED = 0.05  # as a share of a model's weights, for adapters
SMALLER_BATCH = "raise accumulate, set activation_gb or gradient_checkpointing, or lower data.batch_size"


def preview(config: TrainConfig) -> str:
    """Return the text of `train --dry-run`. ValueError for settings that cannot work."""
    config.check()
    source, held_out = open_sources(config)
    texts = config.text.size is not None
    shape = config.model.resolve(None if texts else len(source.classes) or None, config.data.transform.image_size)
    towers = config.text.resolve(shape, config.text.vocab_size) if texts else None
    price = cost(shape)
    images = config.steps * config.data.batch_size
    kinds = "with captions" if texts else f"of {len(source.classes)} classes"
    seen = f"{images:,} are seen, {images / len(source):,.2f} epochs"
    checked = min(len(held_out), config.evaluation.examples or len(held_out))
    learned = learned_names(config, towers or shape)
    training = training_flops(shape, [name.removeprefix("image.") for name in learned]) / 1e9
    gigaflops = f"{price.forward_flops / 1e9:.3f} GFLOPs forward and {training:.3f} GFLOPs training"
    of = "" if towers is None else "image tower: "
    lines = [f"  {of}{price.params:,} parameters, {gigaflops} per image"]
    if towers is not None:
        text = text_cost(towers.text, towers.embed_dim or features_dim(towers))
        lines.append(f"  text tower: {text.params:,} parameters, {text.train_flops / 1e9:.3f} GFLOPs training per text")
    flops = training_flops(towers or shape, learned) * images
    need = memory_needed(config, shape)
    return "\n".join(
        [
            "settings (those that are None are left out)",
            *setting_lines({key: value for key, value in config.to_dict().items() if texts or key != "text"}),
            "model",
            *setting_lines((towers or shape).to_dict()),
            "data",
            f"  {len(source):,} training images {kinds}; {seen}",
            f"  {len(held_out):,} validation images, of which {checked:,} are evaluated",
            f"  {buffer_line(config)}",
            *(f"  {remark}" for remark in remarks(config, shape, source)),
            "cost",
            *lines,
            f"  {flops:.3e} FLOPs in all",
            "memory, about" if towers is None else "memory, about, of the image tower",
            *(f"  {name:<16}{size / 2**20:10,.1f} MiB" for name, size in need.items()),
            *(f"  {remark}" for remark in too_much(need, memory_of(config.device))),
        ]
    )


def learned_names(config: TrainConfig, shape: ViTConfig | TwoTowerConfig) -> list[str]:
    """Return the names of the parameters that a run trains, without building its model in memory."""
    import torch

    with torch.device("meta"):
        model = VisionTransformer(shape) if isinstance(shape, ViTConfig) else TwoTower(shape)
    section = config.model
    groups = parameter_groups(model, config.optim, locked=section.locked, adapters=section.adapters)
    return [name for group in groups for name in group["names"]]


def remarks(config: TrainConfig, shape: ViTConfig, source: Source) -> list[str]:
    """Return a sentence for each setting that works but is probably a mistake."""
    said = unseen_pixels(config.data.transform.size, shape.patch_size)
    epochs = config.steps * config.data.batch_size / max(1, len(source))
    if epochs > MANY_EPOCHS and not getattr(source, "generated", False):
        said.append(f"each of the {len(source):,} training images is seen {epochs:,.0f} times; --epochs sets how often")
    outputs = config.model.num_classes
    if outputs is not None and outputs > len(source.classes):
        what = f"the head has {outputs} outputs, and the data has {len(source.classes)} classes"
        said.append(f"{what}, so their names are not saved with the model; leave out --model.num-classes")
    if config.model.adapters:
        share = learned_share(config, shape)
        advice = ": adapters of the dense model itself are fewer" if share > MANY_LEARNED else ""
        said.append(f"{share:.1%} of the weights are trained and saved{advice}")
    return said


def learned_share(config: TrainConfig, shape: ViTConfig) -> float:
    """Return the share of a model's weights that a run trains."""
    import torch

    with torch.device("meta"):
        sizes = {name: value.numel() for name, value in VisionTransformer(shape).named_parameters()}
    return sum(sizes[name] for name in learned_names(config, shape)) / sum(sizes.values())


def buffer_line(config: TrainConfig) -> str:
    """Say how much memory the batches that wait for the device take at most."""
    b = buffers_of(config.data, config.data.batch_size, "cuda" if on_cuda(config) else "cpu")
    kind = "pinned uint8" if on_cuda(config) else "float32"
    count = "1 worker" if b.workers == 1 else f"{b.workers} workers"
    ahead = f"{count}, {b.prefetch} batches ahead of each" if b.workers else "made in this process"
    return f"batches of {b.batch_bytes / 2**20:,.1f} MiB ({kind}), {ahead}: at most {b.bytes / 2**20:,.1f} MiB"


def setting_lines(values: dict) -> list[str]:
    return [f"  {key} = {value}" for key, value in flatten(values).items() if value is not None]


def on_cuda(config: TrainConfig) -> bool:
    """Tell if the run would be on a GPU of this machine."""
    import torch

    return config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())


def has_bfloat16(config: TrainConfig) -> bool:
    """Tell if the run would be on a GPU with products of bfloat16; a GPU of another machine is assumed to have them."""
    import torch

    there = torch.cuda.is_available()
    return on_cuda(config) and (not there or torch.cuda.is_bf16_supported(including_emulation=False))


def recomputed(config: TrainConfig, shape: ViTConfig, item: int, processes: int = 1) -> Collection[int]:
    """Return the blocks whose inside is computed twice; `item` is the size in bytes of a number that is kept."""
    if config.activation_gb is None:
        return range(shape.depth if config.gradient_checkpointing else 0)
    images = config.data.batch_size // processes // config.accumulate
    return blocks_to_recompute(shape, images, item, config.activation_gb * 1e9)


def memory_needed(config: TrainConfig, shape: ViTConfig) -> dict[str, int]:
    """Return the bytes that training needs, by kind; weights that are not trained have no gradients."""
    item = 2 if config.precision == "bfloat16" or (config.precision == "auto" and has_bfloat16(config)) else 4
    need = memory(
        shape,
        config.data.batch_size // config.accumulate,
        optimizer=config.optim.name,
        activation_bytes=item,
        state_bytes=2 if config.optim.states == "bfloat16" else 4,
        in_backward=config.optim.in_backward,
        recomputed=recomputed(config, shape, item),
    )
    share = 0 if config.model.locked else learned_share(config, shape)
    activations = 0 if config.model.locked else need.activations
    need = Memory(need.weights, round(need.gradients * share), round(need.optimizer_state * share), activations)
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


def too_much(need: Mapping[str, int], has: int | None) -> list[str]:
    """Say that training needs more bytes than the device has, and what to change; nothing if they suffice."""
    if has is None or need["sum"] <= has:
        return []
    stays = need["sum"] - need["activations"]
    advice = SMALLER_BATCH if stays < has else "take a smaller model, or spread it over devices (softmoe plan)"
    return [f"this is more than the {has / 2**20:,.1f} MiB that the device has: {advice}"]
