"""A model from whatever names one: a saved folder, a run, the Hub, or a file of somebody else's weights."""

from pathlib import Path
from typing import Any

import torch

from softmoe.convert.timm import from_timm, read_tensors
from softmoe.convert.vit import from_vit
from softmoe.models import VisionTransformer
from softmoe.storage import from_pretrained

SUFFIXES = (".npz", ".safetensors")


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
