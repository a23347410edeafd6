"""Dense vision transformers under timm's names; timm itself is not needed.

    model = from_timm("model.safetensors")                            sizes are read from the tensors
    model = from_timm(timm_model.state_dict(), heads=6, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

What timm keeps apart and we do not have is folded into its neighbors, which changes nothing but the rounding: layer
scales go into the matrices before them, and the mean and deviation of the pixels into the patch embedding, so that the
model takes images in [-1, 1] as all of ours do. timm's GELU is the exact one unless a model says otherwise.

Letters: D width.
"""

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from softmoe.convert.vit import size_of_positions, square_patch
from softmoe.convert.vmoe import as_tensor, read_npz
from softmoe.models import VisionTransformer, ViTConfig

Tensors = dict[str, Tensor]
HEAD_WIDTH = 64  # of nearly all vision transformers; timm's packed weights do not tell it
_RENAMES = (
    (r"^patch_embed\.", "embed."),
    (r"^cls_token$", "class_token"),
    (r"^pos_embed$", "positions.table"),
    (r"^norm\.", "encoder.norm."),
    (r"^blocks\.", "encoder.blocks."),
    (r"\.attn\.(q|k)_norm\.", lambda match: f".attention.{'query' if match[1] == 'q' else 'key'}_norm."),
    (r"\.attn\.proj\.", ".attention.out."),
    (r"\.attn\.", ".attention."),
    (r"^pre_logits\.fc\.", "pre_logits."),
    (r"^attn_pool\.latent$", "pool.probe"),
    (r"^attn_pool\.proj\.", "pool.attention.out."),
    (r"^attn_pool\.(norm|mlp|attention)\.", r"pool.\1."),
)
_WHY_NOT = {
    "fc_norm.": "a norm after pooling",
    "norm_pre.": "a norm before the first block",
    "reg_token": "register tokens",
    "dist_token": "a distillation token",
    "patch_embed.backbone.": "a convolutional network below",
}


def from_timm(
    tensors: Mapping[str, Any] | str | PathLike[str],
    *,
    heads: int | None = None,
    activation: str = "gelu",
    image_size: int | tuple[int, int] | None = None,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
) -> VisionTransformer:
    """The model that `tensors` (name -> tensor or array, or the path of a .safetensors or .npz) describe.

    `heads` defaults to the width over 64, or to what the norms of queries and keys tell. `image_size` is needed where
    the grid of positions is not square. `mean` and `std` are those of the pixels in [0, 1] that the model was trained
    with. `activation="gelu_tanh"` is for models whose MLPs use it (weights that came from JAX were trained with it).
    """
    if isinstance(tensors, str | PathLike):
        tensors = read_tensors(tensors)
    source = {name: value if isinstance(value, Tensor) else as_tensor(value) for name, value in tensors.items()}
    refuse_unknown(source)
    state = rename(fold_layer_scales(pack_pool(with_biases(source))))
    config = infer_config(state, heads, activation, image_size)
    drop_empty_norm_biases(state)
    if config.pool == "class" and state["positions.table"].shape[1] == config.tokens - 1:
        table = state["positions.table"]  # the class token has no position
        state["positions.table"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    fold_pixels(state, mean, std)
    wide = state["embed.proj.weight"].dtype == torch.float64
    model = VisionTransformer(config).to(torch.float64 if wide else torch.float32)
    load_strictly(model, state)
    return model


def read_tensors(path: str | PathLike[str]) -> Mapping[str, Any]:
    if Path(path).suffix == ".npz":
        return read_npz(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def refuse_unknown(source: Tensors) -> None:
    if "patch_embed.proj.weight" not in source or "blocks.0.attn.qkv.weight" not in source:
        raise ValueError(
            "expected a vision transformer in timm's naming (patch_embed.proj.weight, blocks.0.attn.qkv.weight, ...), "
            f"got: {', '.join(list(source)[:8])}, ..."
        )
    for part, what in _WHY_NOT.items():
        if any(name.startswith(part) for name in source):
            raise ValueError(f"this model has {what} ({part.rstrip('.')}), which our vision transformer does not have")


def with_biases(source: Tensors) -> Tensors:
    """Add zeros where a linear has no bias in any block. ValueError if some blocks have it: then it was lost."""
    full = dict(source)
    kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in source}
    for name, weight in source.items():
        if re.search(r"(qkv|proj|fc1|fc2|\.q|\.kv)\.weight$", name):
            bias = name.removesuffix("weight") + "bias"
            if bias not in source and re.sub(r"\.\d+\.", ".*.", bias) in kinds:
                raise ValueError(f"{bias} is missing, which other blocks of these weights have")
            full.setdefault(bias, weight.new_zeros(weight.shape[0]))
    return full


def pack_pool(source: Tensors) -> Tensors:
    """The pool's query, and its key with value, as one matrix."""
    if "attn_pool.latent" not in source:
        return source
    packed = {name: value for name, value in source.items() if not re.match(r"attn_pool\.(q|kv)\.", name)}
    for part in ("weight", "bias"):
        both = [source[f"attn_pool.{name}.{part}"] for name in ("q", "kv")]
        packed[f"attn_pool.attention.qkv.{part}"] = torch.cat(both)
    return packed


def fold_layer_scales(source: Tensors) -> Tensors:
    """gamma * (W x + b) = (gamma W) x + gamma b."""
    folded = {name: value for name, value in source.items() if not re.search(r"\.ls[12]\.gamma$", name)}
    for name, gamma_D in source.items():
        match = re.fullmatch(r"(blocks\.\d+)\.ls([12])\.gamma", name)
        if match:
            before = f"{match[1]}.{'attn.proj' if match[2] == '1' else 'mlp.fc2'}"
            folded[f"{before}.weight"] = gamma_D[:, None] * source[f"{before}.weight"]
            folded[f"{before}.bias"] = gamma_D * source[f"{before}.bias"]
    return folded


def rename(source: Tensors) -> Tensors:
    state: Tensors = {}
    for name, value in source.items():
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        state[name] = value
    return state


def infer_config(
    state: Tensors, heads: int | None, activation: str, image_size: int | tuple[int, int] | None
) -> ViTConfig:
    weight, first = state["embed.proj.weight"], "encoder.blocks.0"
    width, patch = weight.shape[0], square_patch(tuple(weight.shape[2:]))
    norm = state.get(f"{first}.attention.query_norm.weight")
    head_width = HEAD_WIDTH if norm is None else norm.shape[0]
    if heads is None and width % head_width:
        raise ValueError(f"the number of heads cannot be told from the tensors of width {width}: give heads=")
    table = state.get("positions.table")
    if table is None:
        raise ValueError("expected learned positions (pos_embed), which these tensors do not have")
    blocks = {match[1] for name in state if (match := re.match(r"encoder\.blocks\.(\d+)\.", name))}
    prefix = "class_token" in state
    if prefix and "pool.probe" in state:
        raise ValueError("this model has a class token beside its attention pool, which ours cannot have")
    pre_logits, head = state.get("pre_logits.weight"), state.get("head.weight")
    return ViTConfig(
        image_size=size_of_positions(table.shape[1], patch, image_size, prefix=prefix),
        patch_size=patch,
        width=width,
        depth=len(blocks),
        mlp_dim=state[f"{first}.mlp.fc1.weight"].shape[0],
        heads=width // head_width if heads is None else heads,
        num_classes=None if head is None else head.shape[0],
        pool="class" if prefix else "attention" if "pool.probe" in state else "mean",
        qk_norm=norm is not None,
        activation=activation,
        representation_size=None if pre_logits is None else pre_logits.shape[0],
    )


def drop_empty_norm_biases(state: Tensors) -> None:
    """timm's norms of queries and keys have a bias, ours do not; one that is zero is not missed."""
    for name in [name for name in state if re.search(r"\.(query|key)_norm\.bias$", name)]:
        if state.pop(name).any():
            raise ValueError(f"{name} is not zero, and our norms of queries and keys have no bias")


def fold_pixels(state: Tensors, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
    """Patches of (pixel - mean) / std, from images in [-1, 1]: pixel = (image + 1) / 2."""
    weight = state["embed.proj.weight"]
    mean_3, std_3 = (torch.as_tensor(value, dtype=torch.float64).expand(3) for value in (mean, std))
    if bool((std_3 <= 0).any()):
        raise ValueError(f"std must be above 0, got {std}")
    if bool((mean_3 == 0.5).all()) and bool((std_3 == 0.5).all()):
        return
    exact = weight.to(torch.float64)
    shift = torch.einsum("dcij,c->d", exact, (0.5 - mean_3) / std_3)
    state["embed.proj.weight"] = (exact / (2 * std_3)[:, None, None]).to(weight.dtype)
    state["embed.proj.bias"] = (state["embed.proj.bias"].to(torch.float64) + shift).to(weight.dtype)


def load_strictly(model: VisionTransformer, state: Tensors) -> None:
    """Copy; one ValueError lists all that is missing, too much or of another shape."""
    targets = model.state_dict()
    faults = [f"missing {name}" for name in targets if name not in state]
    faults += [f"unexpected {name}" for name in state if name not in targets]
    faults += [
        f"{name} has shape {tuple(state[name].shape)}, expected {tuple(target.shape)}"
        for name, target in targets.items()
        if name in state and state[name].shape != target.shape
    ]
    faults += [f"{name} is of type {value.dtype}" for name, value in state.items() if not value.is_floating_point()]
    faults += [f"{name} is not finite" for name, value in state.items() if not bool(value.isfinite().all())]
    if faults:
        raise ValueError(f"{len(faults)} tensors do not fit the vision transformer: " + "; ".join(faults))
    model.load_state_dict(state)
