"""A model from whatever names one: a saved folder, a run, the Hub, or a file of somebody else's weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softmoe.convert.timm import from_timm, read_tensors
from softmoe.convert.vit import from_vit
from softmoe.models import VisionTransformer, ViTConfig
from softmoe.storage import from_pretrained
from softmoe.storage.adapters import inherited

SUFFIXES = (".npz", ".safetensors")
_FUNCTION = ("patch_size", "width", "depth", "mlp_dim", "heads", "pool", "positions", "qk_norm", "activation")
_ROUTING = ("router", "num_experts", "slots_per_expert", "normalize", "keep_mlp")


def read_model(where: str | Path, *, device: str | torch.device = "cpu", **options: Any) -> VisionTransformer:
    """Ours by `from_pretrained`; an .npz or .safetensors file by `from_vit` or `from_timm`, told by its names.

    `options` are arguments of those two: heads, activation, image_size, mean, std.
    """
    if Path(where).suffix not in SUFFIXES or Path(where).is_dir():
        if options:
            raise ValueError(f"{', '.join(options)} can be given for files of others' weights only, not for {where}")
        return from_pretrained(where, device)
    if not Path(where).is_file():
        raise ValueError(f"there is no file {where}")
    arrays = read_tensors(where)
    if any(not name.isprintable() or len(name) > 300 for name in arrays):
        raise ValueError(f"{where} is damaged: it has an array whose name is no text")
    timm = "patch_embed.proj.weight" in arrays
    if not timm and set(options) - {"image_size"}:
        raise ValueError(f"{', '.join(options)}: files in the original ViT's naming tell all but image_size themselves")
    try:
        model = from_timm(arrays, **options) if timm else from_vit(arrays, **options)
    except (ArithmeticError, IndexError, KeyError, TypeError, RuntimeError) as error:  # of sizes that no model has
        raise ValueError(f"{where} does not hold the weights of a vision transformer: {_line(error)}") from error
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise ValueError(f"{where} holds values of {name} that are no finite numbers")
    return model.to(device)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@torch.no_grad()
def starting_weights(model: VisionTransformer, weights: str | Path, *, new_head: bool = True) -> dict[str, Tensor]:
    """The state of `model` with the weights of a saved one, whose positions are resampled to the model's grid. Both
    must be of the same shape but for image size and classes. Experts beside the MLPs of a dense model start anew."""
    source = read_model(weights)
    check_same_function(source.config, model.config, str(weights))
    state = model.state_dict() | inherited(model, source)
    if new_head:
        return state
    if source.config.num_classes != model.config.num_classes:
        raise ValueError(
            f"the head of {weights} has {source.config.num_classes or 'no'} classes, the data has "
            f"{model.config.num_classes or 'none'}: start with a new head (model.new_head)"
        )
    return state | {name: value for name, value in source.state_dict().items() if name.startswith("head.")}


def check_same_function(old: ViTConfig, new: ViTConfig, name: str) -> None:
    """ValueError that names every difference."""
    if old.moe is None and new.moe is not None and new.moe.keep_mlp:
        new = replace(new, moe=None)
    before, after = weight_facts(old), weight_facts(new)
    differences = [
        f"{key} {before.get(key)} and {after.get(key)}" for key in before | after if before.get(key) != after.get(key)
    ]
    if differences:
        raise ValueError(f"the weights in {name} are of another model than this run's: {'; '.join(differences)}")


def weight_facts(config: ViTConfig) -> dict[str, Any]:
    """The settings that the names and shapes of the weights, and their meaning, depend on."""
    facts = {key: getattr(config, key) for key in (*_FUNCTION, "representation_size")}
    if config.moe is not None:
        facts |= {key: value for key, value in config.moe.to_dict().items() if key in _ROUTING}
        facts |= {"blocks": config.moe_blocks, "expert_dim": config.moe.hidden_dim(config.mlp_dim)}
    return facts
