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
    if "patch_embed.proj.weight" in arrays:
        return from_timm(arrays, **options).to(device)
    if set(options) - {"image_size"}:
        raise ValueError(f"{', '.join(options)}: files in the original ViT's naming tell all but image_size themselves")
    return from_vit(arrays, **options).to(device)
