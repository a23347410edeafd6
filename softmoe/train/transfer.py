"""From one trained model to the start of another run: other classes, another image size, the same slots.

    config = transfer_config(recipe, "models/soft_s16", image_size=384)     the recipe, for that model's shape
    train(config)

Slots are learned vectors that do not know the number of tokens, so they are kept as they are: with more tokens per
image a Soft MoE costs less than its dense twin.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from softmoe.convert.files import read_model
from softmoe.data import open_source
from softmoe.models import VisionTransformer, ViTConfig
from softmoe.models.embed import LearnedPositions
from softmoe.models.variants import SIZES
from softmoe.parallel import local_shard
from softmoe.storage import (
    Preprocessing,
    SavedModel,
    load_saved,
    load_two_tower,
    open_saved,
    save_pretrained,
)
from softmoe.storage.files import read_json
from softmoe.storage.saved import parse_architecture, split_architecture, tokenizer_of_run
from softmoe.train.config import ModelSection, TrainConfig
from softmoe.train.folder import RunFolder

_FUNCTION = ("patch_size", "width", "depth", "mlp_dim", "heads", "pool", "positions", "qk_norm", "activation")
_ROUTING = ("router", "num_experts", "slots_per_expert", "normalize")


def transfer_config(
    config: TrainConfig, weights: str | Path, *, image_size: int | tuple[int, int] | None = None
) -> TrainConfig:
    """`config` with the shape and the weights of a saved model, for images of this size (None: the model's)."""
    shape = read_model(weights, device="meta").config
    size = shape.image_size if image_size is None else image_size
    return replace(
        config,
        model=replace(section_of(shape), weights=str(weights), new_head=config.model.new_head),
        data=replace(config.data, transform=replace(config.data.transform, image_size=size)),
    )


def locked_config(config: TrainConfig, image: str | Path) -> TrainConfig:
    """`config`, a recipe with a text tower, for the image tower of a saved model, and images as that was saved with."""
    if config.text.size is None:
        raise ValueError("--image is for recipes with a text tower, such as lit; softmoe finetune starts from a model")
    config = transfer_config(config, image)
    config = replace(config, model=replace(config.model, locked=True))
    if Path(image).is_file():  # others' weights do not tell
        return config
    p = open_saved(image).preprocessing
    height, width = p.image_size
    size = height if height == width else p.image_size
    seen = {"image_size": size, "crop": p.crop, "central_ratio": p.central_ratio, "antialias": p.antialias}
    return replace(config, data=replace(config.data, transform=replace(config.data.transform, **seen)))


def section_of(shape: ViTConfig) -> ModelSection:
    """The settings that resolve to `shape`, whatever the number of classes and the image size of the data."""
    sizes = (shape.width, shape.depth, shape.mlp_dim, shape.heads)
    letter = next((letter for letter, known in SIZES.items() if known == sizes), "s")
    given = {f.name: getattr(shape, f.name) for f in fields(ViTConfig)}
    moe = given.pop("moe")
    name = f"vit_{letter}{shape.patch_size}"
    if moe is not None:
        given |= moe.to_dict()
        name = f"{moe.router.name}_{letter}{shape.patch_size}_{moe.num_experts}e"
    del given["num_classes"], given["image_size"]
    return ModelSection(name=name).change(**given)


@torch.no_grad()
def start_from(model: VisionTransformer, weights: str | Path, *, new_head: bool = True) -> None:
    """Copy the weights of a saved model into `model`. Both must be of the same shape but for image size and classes."""
    source = read_model(weights)
    check_same_function(source.config, model.config, str(weights))
    state, mine = dict(source.state_dict()), model.state_dict()
    if isinstance(model.positions, LearnedPositions):
        assert isinstance(source.positions, LearnedPositions)
        state["positions.table"] = source.positions(model.positions.grid)
    if new_head:
        state = {name: value for name, value in state.items() if not name.startswith("head.")}
        state |= {name: value for name, value in mine.items() if name.startswith("head.")}
    elif source.config.num_classes != model.config.num_classes:
        raise ValueError(
            f"the head of {weights} has {source.config.num_classes or 'no'} classes, the data has "
            f"{model.config.num_classes or 'none'}: start with a new head (model.new_head)"
        )
    model.load_state_dict({name: local_shard(value, mine[name]) for name, value in state.items()})


def check_same_function(old: ViTConfig, new: ViTConfig, name: str) -> None:
    """ValueError that names every difference."""
    before, after = describe(old), describe(new)
    differences = [
        f"{key} {before.get(key)} and {after.get(key)}" for key in before | after if before.get(key) != after.get(key)
    ]
    if differences:
        raise ValueError(f"the weights in {name} are of another model than this run's: {'; '.join(differences)}")


def describe(config: ViTConfig) -> dict[str, Any]:
    """What the names and shapes of the weights, and their meaning, depend on."""
    facts = {key: getattr(config, key) for key in (*_FUNCTION, "representation_size")}
    if config.moe is not None:
        facts |= {key: value for key, value in config.moe.to_dict().items() if key in _ROUTING}
        facts["blocks"] = config.moe_blocks
    return facts


def export(run: RunFolder) -> SavedModel:
    """Write the best (else the last) checkpoint of a run as a saved model with its class names, in the run's folder."""
    stored = run.stored()
    if stored is None:
        raise ValueError(f"{run.path} is not the folder of a run")
    link = next((run.checkpoints / name for name in ("best", "last") if (run.checkpoints / name).exists()), None)
    if link is None:
        raise ValueError(f"{run.path} has no checkpoint yet")
    config = stored[0]
    classes = open_source(config.data.train, config.data.train_split).classes
    if (link / "model").is_dir():
        return export_parts(link, config, classes, run.path / "model")
    checkpoint = open_saved(link)
    named = classes if len(classes) == checkpoint.config.num_classes else None
    made = checkpoint.provenance | ({"weights": config.model.weights} if config.model.weights else {})
    return save_pretrained(
        load_saved(checkpoint) if checkpoint.towers is None else load_two_tower(checkpoint),
        run.path / "model",
        preprocessing=checkpoint.preprocessing,
        classes=named,
        provenance=made,
        tokenizer=checkpoint.tokenizer,
    )


def export_parts(checkpoint: Path, config: TrainConfig, classes: Sequence[str], folder: Path) -> SavedModel:
    """The same for a checkpoint of many processes: their parts are put together one tensor at a time."""
    from softmoe.storage.shards import save_parts

    shape, towers = split_architecture(parse_architecture(read_json(checkpoint / "config.json")))
    made = {"run": config.run_name, "step": read_json(checkpoint / "manifest.json")["step"]}
    return save_parts(
        checkpoint / ("ema" if (checkpoint / "ema").is_dir() else "model"),  # the average was evaluated
        towers or shape,
        folder,
        tokenizer=towers and tokenizer_of_run(checkpoint.parent.parent, config.text.lower),
        preprocessing=Preprocessing.of(config.data.transform),
        classes=classes if len(classes) == shape.num_classes else None,
        provenance=made | {"recipe_data": config.data.train},
    )
