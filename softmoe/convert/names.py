"""Rename the tensors of a vision transformer from the names of other PyTorch libraries to timm's.

Understood are timm's own (also as published by DINOv2, DeiT and MAE), Hugging Face's ViT, DINOv2, CLIP and SigLIP, on
disk and in memory, open_clip's and torchvision's; of models with a text tower the image tower is taken.
"""

import re

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
IN_PLACE = (
    "load it with its own library and put experts into it as it is: softmoe.upcycle_(model, mlps=PATTERN), where the "
    "pattern names its MLPs, such as 'blocks.*.mlp' in timm"
)
_PATCHES = (  # where each library keeps the patch embedding
    "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embedding.weight",
    "embeddings.patch_embeddings.weight",
    "conv_proj.weight",
    "conv1.weight",
)
_BESIDE = {  # tensors outside of the tower that belong to it
    "classifier.weight": "head.weight",
    "classifier.bias": "head.bias",
    "visual_projection.weight": "head.weight",
    "visual.head.proj.weight": "head.weight",
}
_UNUSED = re.compile(r"(^|\.)mask_token$|^decoder_|^embeddings\.position_ids$")  # of masked pre-training
_RENAMES = (
    (r"^(?:embeddings\.)?(?:cls_token|class_token|class_embedding)$", "cls_token"),
    (r"^(?:embeddings\.)?register_tokens$", "reg_token"),
    (r"^(?:embeddings\.position_embeddings?(?:\.weight)?|encoder\.pos_embedding|positional_embedding)$", "pos_embed"),
    (r"^(?:embeddings\.patch_embeddings?(?:\.projection)?|conv1|conv_proj)\.", "patch_embed.proj."),
    (r"^(?:encoder\.)?layers?\.(?:encoder_layer_)?(\d+)\.", r"blocks.\1."),
    (r"^transformer\.resblocks\.(\d+)\.", r"blocks.\1."),
    (r"\.(?:layernorm_before|layer_norm1|ln_1)\.", ".norm1."),
    (r"\.(?:layernorm_after|layer_norm2|ln_2)\.", ".norm2."),
    (r"^(blocks\.\d+)\.(?:self_attention|attn)\.in_proj_", r"\1.attn.qkv."),
    (r"\.attention\.attention\.(q|k|v)(?:uery|ey|alue)\.", r".attn.\1."),
    (r"\.(?:attention|self_attn)\.(q|k|v)_proj\.", r".attn.\1."),
    (r"^(blocks\.\d+)\.(?:attention\.output\.dense|(?:attention|self_attn|self_attention|attn)\.(?:o|out)_proj)\.",
     r"\1.attn.proj."),
    (r"^(blocks\.\d+)\.(?:intermediate\.dense|mlp\.c_fc|mlp\.0|mlp\.linear_1)\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.(?:output\.dense|mlp\.c_proj|mlp\.3|mlp\.linear_2)\.", r"\1.mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.ls_(\d)\.gamma$", r".ls\1.gamma"),
    (r"^(?:pre_layrnorm|ln_pre)\.", "norm_pre."),
    (r"^(?:layernorm|post_layernorm|ln_post|encoder\.ln)\.", "norm."),
    (r"^(?:pooler\.dense|heads\.pre_logits)\.", "pre_logits.fc."),
    (r"^heads\.head\.", "head."),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.in_proj_", "attn_pool.qkv."),
    (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.mlp\.", "attn_pool.mlp."),
)  # fmt: skip


def rename_to_timm(source: Tensors) -> Tensors:
    """Return the image tower under timm's names, query, key and value in one matrix. ValueError if there is none."""
    prefix = tower_prefix(source)
    named = {
        new: source[old] for old, new in _BESIDE.items() if old in source and not (prefix and old.startswith(prefix))
    }
    for name, value in source.items():
        inner = name.removeprefix(prefix)
        if name.startswith(prefix) and name not in _BESIDE and not _UNUSED.search(inner):
            for pattern, replacement in _RENAMES:
                inner = re.sub(pattern, replacement, inner)
            named[inner] = value
    for name in ("cls_token", "pos_embed"):  # some libraries store them without leading axes
        if name in named:
            named[name] = named[name].reshape(1, -1, named[name].shape[-1])
    if "proj" in named:  # open_clip's, which is multiplied from the other side
        named["head.weight"] = named.pop("proj").transpose(0, -1)
    return pack_qkv(named)


def tower_prefix(source: Tensors) -> str:
    """Find the prefix of every name of the image tower: nothing, `vit.`, `vision_model.`, `visual.trunk.`, ..."""
    for ending in _PATCHES:
        for name, value in source.items():
            if (name == ending or name.endswith(f".{ending}")) and value.ndim == 4:
                return name.removesuffix(ending)
    raise ValueError(
        "expected a vision transformer in timm's naming (patch_embed.proj.weight, blocks.0.attn.qkv.weight, ...), "
        f"Hugging Face's, open_clip's or torchvision's, got: {', '.join(list(source)[:8])}, ..."
    )


def pack_qkv(named: Tensors) -> Tensors:
    """Join query, key and value in one matrix where they are three; a bias that one of them lacks is zero."""
    packed = {name: value for name, value in named.items() if not re.search(r"^blocks\.\d+\.attn\.[qkv]\.", name)}
    for name, query in named.items():
        if match := re.fullmatch(r"(blocks\.\d+\.attn)\.q\.weight", name):
            parts = [f"{match[1]}.{part}" for part in "qkv"]
            if missing := [f"{part}.weight" for part in parts if f"{part}.weight" not in named]:
                raise ValueError(f"{missing[0]} is missing from these weights")
            packed[f"{match[1]}.qkv.weight"] = torch.cat([named[f"{part}.weight"] for part in parts])
            if any(f"{part}.bias" in named for part in parts):
                nothing = query.new_zeros(query.shape[0])
                packed[f"{match[1]}.qkv.bias"] = torch.cat([named.get(f"{part}.bias", nothing) for part in parts])
    return packed
