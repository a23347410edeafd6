"""A model from whatever names one: a saved folder, a run, the Hub, or somebody else's file or folder of weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softmoe.convert.foreign import open_foreign
from softmoe.models import VisionTransformer, ViTConfig
from softmoe.storage import from_pretrained
from softmoe.storage.adapters import inherited

_FUNCTION = ("patch_size", "width", "depth", "mlp_dim", "heads", "pool", "positions", "qk_norm", "activation")
_PARTS = ("representation_size", "registers", "layer_scale", "pre_norm", "pool_norm", "norm_eps")
_ROUTING = ("router", "num_experts", "slots_per_expert", "normalize", "keep_mlp")


def read_model(where: str | Path, *, device: str | torch.device = "cpu", **options: Any) -> VisionTransformer:
    """Ours by `from_pretrained`; others' files, folders and Hub ids by `open_foreign`, which takes the `options`."""
    found = open_foreign(where, **options)
    return from_pretrained(where, device) if found is None else found.model.to(device)


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
    facts = {key: getattr(config, key) for key in (*_FUNCTION, *_PARTS)}
    if config.moe is not None:
        facts |= {key: value for key, value in config.moe.to_dict().items() if key in _ROUTING}
        facts |= {"blocks": config.moe_blocks, "expert_dim": config.moe.hidden_dim(config.mlp_dim)}
    return facts
