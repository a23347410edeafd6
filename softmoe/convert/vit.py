"""Read dense vision transformers under the names of the original JAX code (ViT, AugReg) and of big_vision.

    model = from_vit("S_16-i21k-300ep.npz")          sizes are read from the arrays

Three generations of names are understood: raw files whose counters run over all classes of a block
(`MultiHeadDotProductAttention_1`, `LayerNorm_2`, `MlpBlock_3`), renumbered ones, and big_vision's (positions at the
top, `MAPHead_0`, blocks stacked by a scan). Inner shapes are those of the paper's own code, so the arrays are renamed
and handed to `from_vmoe`, which is strict. Both code bases use the tanh form of GELU and images in [-1, 1], as we do.
"""

import math
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch

from softmoe.convert.vmoe import from_vmoe, read_npz
from softmoe.models import VisionTransformer, ViTConfig

Arrays = dict[str, np.ndarray]
PREFIXES = ("opt/target/", "params/img/", "params/")  # pre-linen optimizers, image towers, plain checkpoints
POSITIONS = "Encoder/posembed_input/pos_embedding"
_RENAMES = (
    (
        r"^(probe$|MultiHeadDotProductAttention_0/|LayerNorm_0/|MlpBlock_0/)",
        r"MAPHead_0/\1",
    ),  # early files have the head's parts at the top
    (r"^MAPHead_0/(MultiHeadDotProductAttention|LayerNorm)_0/", r"MapHead/\1/"),
    (r"^MAPHead_0/MlpBlock_0/", "MapHead/Mlp/"),
    (r"^MAPHead_0/", "MapHead/"),
    (r"^(Transformer/)?pos_embedding$", POSITIONS),
    (r"^Transformer/", "Encoder/"),
    (r"(/encoderblock_\d+)/MultiHeadDotProductAttention_\d/", r"\1/SelfAttention/"),
    (r"(/encoderblock_\d+)/MlpBlock_\d/", r"\1/Mlp/"),
    (r"(/encoderblock_\d+)/LayerNorm_2/", r"\1/LayerNorm_1/"),
)


def from_vit(
    arrays: Mapping[str, Any] | str | PathLike[str], *, image_size: int | tuple[int, int] | None = None
) -> VisionTransformer:
    """Build the model that `arrays` (name -> array, or the path of an .npz) describe, with their values.

    `image_size` (pixels, or height and width) is needed where the grid of positions is not square, and for models
    with fixed sine positions, which store none; those are taken for 224 pixels otherwise.
    """
    if isinstance(arrays, str | PathLike):
        arrays = read_npz(arrays)
    named = rename(without_prefix({name: np.asarray(array) for name, array in arrays.items()}))
    config = infer_config(named, image_size)
    if config.pool == "class" and config.positions == "learned" and named[POSITIONS].shape[1] == config.tokens - 1:
        nothing = np.zeros_like(named[POSITIONS][:, :1])  # big_vision adds the class token after the positions
        named[POSITIONS] = np.concatenate([nothing, named[POSITIONS]], axis=1)
    kernel = named["embedding/kernel"]
    wide = kernel.dtype == np.float64
    model = VisionTransformer(config).to(torch.float64 if wide else torch.float32)
    from_vmoe(named, model)
    return model


def without_prefix(arrays: Arrays) -> Arrays:
    """Return the part of a checkpoint that is the model, without optimizer state and text towers."""
    for prefix in PREFIXES:
        if f"{prefix}embedding/kernel" in arrays:
            return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    return arrays


def rename(arrays: Arrays) -> Arrays:
    """Return the arrays under the names of the paper's code."""
    if "conv_root/kernel" in arrays:
        raise ValueError("these arrays are of a hybrid model with a ResNet below the transformer, which we do not have")
    named: Arrays = {}
    for name, array in unstack(arrays).items():
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        named[name] = array
    return named


def unstack(arrays: Arrays) -> Arrays:
    """Split arrays that hold all blocks, the depth in front: big_vision may run its blocks in a scan."""
    scanned = "Transformer/encoderblock/"
    flat = {name: array for name, array in arrays.items() if not name.startswith(scanned)}
    for name, array in arrays.items():
        if name.startswith(scanned):
            rest = name.removeprefix(scanned)
            flat |= {f"Transformer/encoderblock_{index}/{rest}": layer for index, layer in enumerate(array)}
    return flat


def infer_config(arrays: Arrays, image_size: int | tuple[int, int] | None) -> ViTConfig:
    """Read the settings from the shapes of renamed arrays."""
    first = "Encoder/encoderblock_0"
    needed = ("embedding/kernel", f"{first}/SelfAttention/query/kernel", f"{first}/Mlp/Dense_0/kernel")
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ValueError(
            f"expected a dense vision transformer in the naming of the original ViT or of big_vision, but after "
            f"renaming there is no {' and no '.join(missing)} among: {', '.join(list(arrays)[:8])}, ..."
        )
    kernel, query, hidden = (arrays[name] for name in needed)
    patch = square_patch(kernel.shape[:2])
    blocks = {int(match[1]) for name in arrays if (match := re.match(r"Encoder/encoderblock_(\d+)/", name))}
    table = arrays.get(POSITIONS)
    size = image_size or 224
    if table is not None:
        size, _ = size_of_positions(table.shape[1], patch, image_size, (0, 1) if "cls" in arrays else (0,))
    pre_logits, head = arrays.get("pre_logits/kernel"), arrays.get("head/kernel")
    return ViTConfig(
        image_size=size,
        patch_size=patch,
        width=kernel.shape[3],
        depth=len(blocks),
        mlp_dim=hidden.shape[1],
        heads=query.shape[1],
        num_classes=None if head is None else head.shape[1],
        pool="class" if "cls" in arrays else "attention" if "MapHead/probe" in arrays else "mean",
        positions="sincos" if table is None else "learned",
        qk_norm=f"{first}/SelfAttention/query_ln/scale" in arrays,
        representation_size=None if pre_logits is None else pre_logits.shape[1],
    )


def square_patch(sides: tuple[int, ...]) -> int:
    if sides[0] != sides[1]:
        raise ValueError(f"expected square patches, got {sides[0]} x {sides[1]} pixels")
    return int(sides[0])


def size_of_positions(
    rows: int, patch: int, image_size: int | tuple[int, int] | None, prefixes: Iterable[int]
) -> tuple[int | tuple[int, int], int]:
    """Return the image size of a table of `rows` positions, and how many rows are of tokens before the patches.

    That is one of `prefixes`: a table may or may not hold rows for class token and registers.
    """
    cells_of = {rows - prefix: prefix for prefix in prefixes}
    if image_size is not None:
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        if (cells := (height // patch) * (width // patch)) not in cells_of:
            raise ValueError(
                f"images of {height} x {width} are {height // patch} x {width // patch} patches of {patch} pixels, "
                f"but there are {rows} positions"
            )
        return image_size, cells_of[cells]
    for cells, prefix in cells_of.items():
        side = math.isqrt(max(cells, 0))
        if side and side * side == cells:
            return side * patch, prefix
    raise ValueError(f"{rows} positions are not those of a square image: give image_size=(height, width)")
