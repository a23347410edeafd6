"""Read dense vision transformers of other PyTorch libraries, and write ours under timm's names; no library is needed.

    imagenet = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    model = from_timm("dinov2_vits14.safetensors", **imagenet)             sizes are read from the tensors
    model = from_timm(hugging_face_model.state_dict(), heads=6, **imagenet)
    tensors, arguments = to_timm(model)

The mean and deviation of the pixels are folded into the patch embedding, which changes nothing but the rounding, so
that the model takes images in [-1, 1] as all of ours do. A class token that is not pooled is a register to us. timm's
GELU is the exact one unless a model says otherwise. A projection into the space of texts (CLIP) becomes the head.

Letters: D width.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.convert.names import IN_PLACE, Tensors, rename_to_timm
from softmoe.convert.vit import size_of_positions, square_patch
from softmoe.convert.vmoe import as_tensor, read_npz
from softmoe.models import VisionTransformer, ViTConfig
from softmoe.models.conventions import POOLS
from softmoe.models.embed import SinCosPositions
from softmoe.storage.weights import WeightFiles

HEAD_WIDTH = 64  # of nearly all vision transformers; packed weights do not tell it
HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}  # the exceptions: so400m, H, g, G and E of all libraries
CLIP_EPS = 1e-5
MAX_LISTED = 12  # faults in one message
_FROM_TIMM = (
    (r"^patch_embed\.", "embed."),
    (r"^cls_token$", "class_token"),
    (r"^reg_token$", "registers"),
    (r"^pos_embed$", "positions.table"),
    (r"^norm_pre\.", "pre_norm."),
    (r"^norm\.", "encoder.norm."),
    (r"^fc_norm\.", "pool_norm."),
    (r"^blocks\.", "encoder.blocks."),
    (r"\.ls([12])\.gamma$", r".scale\1"),
    (r"\.attn\.(q|k)_norm\.", lambda match: f".attention.{'query' if match[1] == 'q' else 'key'}_norm."),
    (r"\.attn\.proj\.", ".attention.out."),
    (r"\.attn\.", ".attention."),
    (r"^pre_logits\.fc\.", "pre_logits."),
    (r"^attn_pool\.latent$", "pool.probe"),
    (r"^attn_pool\.qkv\.", "pool.attention.qkv."),
    (r"^attn_pool\.proj\.", "pool.attention.out."),
    (r"^attn_pool\.(norm|mlp)\.", r"pool.\1."),
)
_TO_TIMM = (
    (r"^encoder\.norm\.", "norm."),
    (r"^encoder\.blocks\.", "blocks."),
    (r"^embed\.", "patch_embed."),
    (r"^class_token$", "cls_token"),
    (r"^registers$", "reg_token"),
    (r"^positions\.table$", "pos_embed"),
    (r"^pre_norm\.", "norm_pre."),
    (r"^pool_norm\.", "fc_norm."),
    (r"\.scale([12])$", r".ls\1.gamma"),
    (r"^pool\.probe$", "attn_pool.latent"),
    (r"^pool\.attention\.out\.", "attn_pool.proj."),
    (r"^pool\.attention\.", "attn_pool."),
    (r"^pool\.", "attn_pool."),
    (r"\.attention\.(query|key)_norm\.", lambda match: f".attn.{match[1][0]}_norm."),
    (r"\.attention\.out\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
)
_UNSUPPORTED = {
    r"^dist_token$": "a distillation token",
    r"^patch_embed\.backbone\.": "a convolutional network below",
    r"\.mlp\.(w12|weights_in|gate_proj|fc1_g)\.": "gated MLPs (SwiGLU)",
    r"rel_pos|relative_position": "relative positions",
}


def from_timm(
    tensors: Mapping[str, Any] | str | PathLike[str],
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    heads: int | None = None,
    activation: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    pool: str | None = None,
    norm_eps: float | None = None,
) -> VisionTransformer:
    """Build the model that `tensors` (name -> tensor or array, or the path of a .safetensors or .npz) describe.

    The names may be timm's, Hugging Face's, open_clip's or torchvision's. `mean` and `std` are those of the pixels in
    [0, 1] that the model was trained with; nothing in the tensors tells them, so they must be given. `heads` defaults
    to the width over 64 (16 for the usual sizes that are not so), or to what the norms of queries and keys tell.
    `activation` is gelu, gelu_tanh (SigLIP; weights that came from JAX were trained with it) or quick_gelu (OpenAI's
    CLIP). `image_size` is needed where the grid of positions is not square. `pool` is mean, class or attention, if it
    is not the one that the tensors suggest. `norm_eps` defaults to 1e-6, and to 1e-5 for CLIP.
    """
    if isinstance(tensors, str | PathLike):
        tensors = read_tensors(tensors)
    given = {name: value if isinstance(value, Tensor) else as_tensor(value) for name, value in tensors.items()}
    source = rename_to_timm(given)
    refuse_unknown(source)
    if mean is None or std is None:
        raise ValueError(
            "these weights do not say which mean and std of the pixels they were trained with: give mean and std, as "
            "--mean 0.5 --std 0.5 or FILE?mean=0.5&std=0.5 (0.5 and 0.5 for AugReg and SigLIP; 0.485,0.456,0.406 and "
            "0.229,0.224,0.225 for DeiT, MAE, DINOv2 and torchvision; 0.4815,0.4578,0.4082 and 0.2686,0.2613,0.2758 "
            "for CLIP)"
        )
    clip = "norm_pre.weight" in source
    if clip and activation is None:
        raise ValueError("CLIP models have gelu or, OpenAI's, quick_gelu, which tensors do not tell: give activation")
    state = rename(pack_pool(with_biases(source)), _FROM_TIMM)
    defaults = {"activation": activation or "gelu", "norm_eps": norm_eps or (CLIP_EPS if clip else 1e-6)}
    config = place_prefix(state, infer_config(state, heads, pool), image_size, defaults)
    drop_empty_norm_biases(state)
    fold_pixels(state, mean, std)
    wide = state["embed.proj.weight"].dtype == torch.float64
    model = VisionTransformer(config).to(torch.float64 if wide else torch.float32)
    load_strictly(model, state)
    return model


@torch.no_grad()
def to_timm(model: VisionTransformer) -> tuple[Tensors, dict[str, Any]]:
    """Return a dense model's tensors under timm's names, and arguments of timm's VisionTransformer that takes them.

    Images are in [-1, 1]: mean and std are 0.5. ValueError for a model with experts, which timm does not have.
    """
    c = model.config
    if c.moe_blocks:
        raise ValueError("timm's vision transformer has no experts: only dense models can be written under its names")
    if c.representation_size or c.merge or c.head_blocks:
        raise ValueError("timm's vision transformer has no tanh layer, no merged tokens and no head on several blocks")
    state = rename(dict(model.state_dict()), _TO_TIMM)
    if isinstance(model.positions, SinCosPositions):
        state["pos_embed"] = model.positions.table
    if c.pre_norm and "pos_embed" in state:  # such models have no bias of the patches in timm; positions can hold it
        table, bias = state["pos_embed"].clone(), state.pop("patch_embed.proj.bias")
        table[:, c.prefix :] += bias
        state["pos_embed"] = table
    if c.pool == "attention":
        for part in ("weight", "bias"):
            packed = state.pop(f"attn_pool.qkv.{part}")
            state[f"attn_pool.q.{part}"], state[f"attn_pool.kv.{part}"] = packed.split([c.width, 2 * c.width])
    for name in [name for name in state if re.search(r"\.[qk]_norm\.weight$", name)]:
        state[name.removesuffix("weight") + "bias"] = torch.zeros_like(state[name])
    arguments = {
        "img_size": c.image_size,
        "patch_size": c.patch_size,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.heads,
        "mlp_ratio": c.mlp_dim / c.width,
        "num_classes": c.num_classes or 0,
        "global_pool": next(theirs for theirs, ours in POOLS.items() if ours == c.pool),
        "class_token": c.pool == "class",
        "reg_tokens": c.registers,
        "pos_embed": "none" if c.positions == "none" else "learn",
        "qk_norm": c.qk_norm,
        "init_values": 1e-5 if c.layer_scale else None,
        "pre_norm": c.pre_norm,
        "fc_norm": c.pool_norm,
        "act_layer": c.activation,  # timm has the same names
        "norm_layer": partial(nn.LayerNorm, eps=c.norm_eps),
    }
    return {name: value.clone().contiguous() for name, value in state.items()}, arguments


def read_tensors(path: str | PathLike[str]) -> Mapping[str, Any]:
    if Path(path).suffix == ".npz":
        return read_npz(path)
    return read_safetensors(Path(path).parent, [Path(path).name])


def read_safetensors(folder: Path, files: Iterable[str]) -> Tensors:
    """Return the tensors of one or several files. ValueError if one of them is in two."""
    with WeightFiles(folder, files) as weights:
        return {name: weights.tensor(name) for name in weights.names}


def refuse_unknown(source: Tensors) -> None:
    """Raise a ValueError for a model with parts that our vision transformer does not have."""
    for pattern, what in _UNSUPPORTED.items():
        if found := [name for name in source if re.search(pattern, name)]:
            raise ValueError(
                f"this model has {what} ({found[0]}), which our vision transformer does not have; {IN_PLACE}"
            )
    if "pos_embed" not in source:
        raise ValueError(
            f"this model has no learned positions (pos_embed): rotary ones, as in DINOv3, are not ours; {IN_PLACE}"
        )
    missing = [f"blocks.0.{name}.weight" for name in ("attn.qkv", "mlp.fc1", "mlp.fc2")]
    if missing := [name for name in missing if name not in source]:
        raise ValueError(f"there is no {missing[0]} among these tensors after renaming: {', '.join(list(source)[:8])}")
    if source["blocks.0.mlp.fc1.weight"].shape[0] == 2 * source["blocks.0.mlp.fc2.weight"].shape[1]:
        raise ValueError(f"this model has gated MLPs (SwiGLU), which our vision transformer does not have; {IN_PLACE}")
    head, width = source.get("head.weight"), source["patch_embed.proj.weight"].shape[0]
    if head is not None and head.ndim == 2 and head.shape[1] == 2 * width:
        raise ValueError(f"this model's head sees class token and mean together, which ours cannot; {IN_PLACE}")


def with_biases(source: Tensors) -> Tensors:
    """Add zeros where a linear layer has no bias in any block. ValueError if some blocks have it: then it was lost."""
    full = dict(source)
    kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in source}
    for name, weight in source.items():
        if re.search(r"(qkv|proj|fc1|fc2|\.q|\.kv|^head)\.weight$", name):
            bias = name.removesuffix("weight") + "bias"
            if bias not in source and re.sub(r"\.\d+\.", ".*.", bias) in kinds:
                raise ValueError(f"{bias} is missing, which other blocks of these weights have")
            full.setdefault(bias, weight.new_zeros(weight.shape[0]))
    return full


def pack_pool(source: Tensors) -> Tensors:
    """Join the pool's query, and its key with value, in one matrix."""
    if "attn_pool.q.weight" not in source:
        return source
    packed = {name: value for name, value in source.items() if not re.match(r"attn_pool\.(q|kv)\.", name)}
    for part in ("weight", "bias"):
        both = [source[f"attn_pool.{name}.{part}"] for name in ("q", "kv")]
        packed[f"attn_pool.qkv.{part}"] = torch.cat(both)
    return packed


def rename(source: Tensors, table: Sequence[tuple[str, Any]]) -> Tensors:
    state: Tensors = {}
    for name, value in source.items():
        for pattern, replacement in table:
            name = re.sub(pattern, replacement, name)
        state[name] = value
    return state


def infer_config(state: Tensors, heads: int | None, pool: str | None) -> dict[str, Any]:
    """Read settings from the shapes, but for those that depend on the tokens before the patches."""
    weight, first = state["embed.proj.weight"], "encoder.blocks.0"
    width = weight.shape[0]
    norm = state.get(f"{first}.attention.query_norm.weight")
    if heads is None and norm is None and width not in HEADS and width % HEAD_WIDTH:
        raise ValueError(f"the number of heads cannot be told from the tensors of width {width}: give heads=")
    usual = HEADS.get(width, width // HEAD_WIDTH) if norm is None else width // norm.shape[0]
    blocks = {match[1] for name in state if (match := re.match(r"encoder\.blocks\.(\d+)\.", name))}
    pre_logits, head = state.get("pre_logits.weight"), state.get("head.weight")
    if pool is None:
        alone = "class_token" not in state or "pool_norm.weight" in state
        pool = "attention" if "pool.probe" in state else "mean" if alone else "class"
    if (pool == "attention") != ("pool.probe" in state) or (pool == "class" and "class_token" not in state):
        raise ValueError(f"these weights have no parts for pooling by {pool!r}, or parts that it would not use")
    return {
        "patch_size": square_patch(tuple(weight.shape[2:])),
        "width": width,
        "depth": len(blocks),
        "mlp_dim": state[f"{first}.mlp.fc1.weight"].shape[0],
        "heads": usual if heads is None else heads,
        "num_classes": None if head is None else head.shape[0],
        "pool": pool,
        "qk_norm": norm is not None,
        "layer_scale": f"{first}.scale1" in state,
        "pre_norm": "pre_norm.weight" in state,
        "pool_norm": "pool_norm.weight" in state,
        "representation_size": None if pre_logits is None else pre_logits.shape[0],
    }


def place_prefix(
    state: Tensors, inferred: dict[str, Any], image_size: int | tuple[int, int] | None, defaults: dict[str, Any]
) -> ViTConfig:
    """Make a class token that is not pooled a register, and give every token before the patches a row of positions."""
    if inferred["pool"] != "class" and "class_token" in state:
        parts = [state.pop("class_token"), *([state["registers"]] if "registers" in state else [])]
        state["registers"], first = torch.cat(parts, dim=1), 1
    else:
        first = int("class_token" in state)
    registers = state["registers"].shape[1] if "registers" in state else 0
    prefix = registers + int("class_token" in state)
    table = state["positions.table"]
    size, rows = size_of_positions(table.shape[1], inferred["patch_size"], image_size, (0, first, prefix))
    nothing = table.new_zeros(1, prefix - rows, table.shape[2])  # tokens without a position follow those with one
    state["positions.table"] = torch.cat([table[:, :rows], nothing, table[:, rows:]], dim=1)
    return ViTConfig(image_size=size, registers=registers, **inferred, **defaults)


def drop_empty_norm_biases(state: Tensors) -> None:
    """Drop the biases of timm's norms of queries and keys, which ours lack. ValueError if one is not zero."""
    for name in [name for name in state if re.search(r"\.(query|key)_norm\.bias$", name)]:
        if state.pop(name).any():
            raise ValueError(f"{name} is not zero, and our norms of queries and keys have no bias")


def fold_pixels(state: Tensors, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
    """Fold (pixel - mean) / std into the patch embedding, which sees images in [-1, 1]: pixel = (image + 1) / 2."""
    weight = state["embed.proj.weight"]
    for name, value in (("mean", mean), ("std", std)):
        if not isinstance(value, int | float) and len(value) not in (1, 3):
            raise ValueError(f"{name} is one number, or three for red, green and blue, got {len(value)}")
    mean_3, std_3 = (torch.as_tensor(value, dtype=torch.float64).expand(3) for value in (mean, std))
    if not bool((mean_3.isfinite() & std_3.isfinite() & (std_3 > 0)).all()):
        raise ValueError(f"mean and std must be finite numbers and std above 0, got {mean} and {std}")
    if bool((mean_3 < 0).any()) or bool((torch.maximum(mean_3, std_3) > 1).any()):
        raise ValueError(f"mean and std are those of pixels from 0 to 1, got {mean} and {std}: divide them by 255")
    if bool((mean_3 == 0.5).all()) and bool((std_3 == 0.5).all()):
        return
    exact = weight.to(torch.float64)
    shift = torch.einsum("dcij,c->d", exact, (0.5 - mean_3) / std_3)
    state["embed.proj.weight"] = (exact / (2 * std_3)[:, None, None]).to(weight.dtype)
    state["embed.proj.bias"] = (state["embed.proj.bias"].to(torch.float64) + shift).to(weight.dtype)


def load_strictly(model: VisionTransformer, state: Tensors) -> None:
    """Copy the tensors into `model`. One ValueError lists all that are missing, unexpected or of another shape."""
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
        listed = "; ".join(faults[:MAX_LISTED]) + ("; ..." if len(faults) > MAX_LISTED else "")
        raise ValueError(
            f"{len(faults)} tensors do not fit the vision transformer: {listed}. If they are of another kind of model, "
            f"{IN_PLACE}"
        )
    model.load_state_dict(state)
