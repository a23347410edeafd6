"""Make models by name: `vit_s16`, `soft_s16_128e`, `tokens_choice_b32_32e`, ...

A name is router, size letter, patch size and, with experts, their number (and slots per expert: `soft_s16_32e4p`).
Every combination works; `list_models` lists the usual ones.
"""

import difflib
import re
import warnings
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from softmoe.models.config import ViTConfig
from softmoe.models.moe_config import MoEConfig, no_option, option_names
from softmoe.moe.config import ROUTERS

if TYPE_CHECKING:
    from softmoe.models.vit import VisionTransformer

# width, depth, MLP width and heads by size letter: Ti to H as in the paper, g and G for its collapse study
SIZES: dict[str, tuple[int, int, int, int]] = {
    "ti": (192, 12, 768, 3),
    "s": (384, 12, 1536, 6),
    "b": (768, 12, 3072, 12),
    "l": (1024, 24, 4096, 16),
    "h": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}

PAPER_MODELS: tuple[str, ...] = (  # the long runs of the paper, dense and Soft MoE
    "vit_s16",
    "vit_b16",
    "vit_l16",
    "vit_h14",
    "soft_s16_128e",
    "soft_s14_256e",
    "soft_b16_128e",
    "soft_l16_128e",
    "soft_h14_128e",
    "soft_h14_256e",
)
_NAME = re.compile(
    r"(?P<router>[a-z_]+)_(?P<size>ti|[sblhgG])(?P<patch>\d{1,5})(?:_(?P<experts>\d{1,7})e(?:(?P<slots>\d{1,7})p)?)?"
)
_TIMM = {
    "img_size": "image_size",
    "drop_rate": "head_dropout",
    "proj_drop_rate": "dropout",
    "attn_drop_rate": "attention_dropout",
    "drop_path_rate": "drop_path",
}
_VIT_FIELDS = tuple(f.name for f in fields(ViTConfig) if f.name != "moe")


def list_models() -> list[str]:
    """List the usual names. Others of the same form (any patch size, any number of experts) work too."""
    patches = {"ti": (16, 8), "s": (32, 16, 14, 8), "b": (32, 16), "l": (32, 16), "h": (14,), "g": (14,), "G": (14,)}
    backbones = [f"{size}{patch}" for size, sizes in patches.items() for patch in sizes]
    dense = [f"vit_{backbone}" for backbone in backbones]
    sparse = [f"{router}_{backbone}_32e" for router in ROUTERS for backbone in backbones]
    return sorted({*dense, *sparse, *PAPER_MODELS})


def model_config(
    name: str, *, num_classes: int | None = 1000, image_size: int | tuple[int, int] = 224, **overrides: Any
) -> ViTConfig:
    """Return the configuration of a model by name.

    Overrides are fields of ViTConfig, MoEConfig and the router's config, or timm's img_size, in_chans, drop_rate
    (of the head), proj_drop_rate, attn_drop_rate and drop_path_rate. No classes (None, or timm's 0) is a model
    without a head.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["router"] not in ("vit", *ROUTERS):
        near = difflib.get_close_matches(name, list_models(), n=3, cutoff=0.4)
        raise ValueError(
            f"unknown model {name!r}"
            + (f", did you mean {' or '.join(near)}?" if near else ".")
            + " Names look like vit_s16 or soft_s16_128e"
        )
    if (match["router"] == "vit") != (match["experts"] is None):
        expected = "vit_s16" if match["router"] == "vit" else f"{match['router']}_{match['size']}{match['patch']}_32e"
        raise ValueError(f"{name!r}: only models with experts end in their number, as in {expected}")
    width, depth, mlp_dim, heads = SIZES[match["size"]]
    config = ViTConfig(
        image_size=image_size,
        patch_size=int(match["patch"]),
        width=width,
        depth=depth,
        mlp_dim=mlp_dim,
        heads=heads,
        num_classes=num_classes or None,
    )
    if match["experts"] is not None:
        slots = {} if match["slots"] is None else {"slots_per_expert": int(match["slots"])}
        config = replace(config, moe=MoEConfig.of(match["router"], int(match["experts"]), **slots))
    return override(config, overrides)


def override(config: ViTConfig, changes: dict[str, Any]) -> ViTConfig:
    changes = {_TIMM.get(key, key): value for key, value in changes.items()}
    if changes.pop("pretrained", False):
        raise ValueError("no weights come by a model's name: softmoe.from_pretrained takes files, folders and Hub ids")
    if (channels := changes.pop("in_chans", 3)) != 3:
        raise ValueError(f"images have 3 channels here, not {channels}: repeat or drop channels before the model")
    vit = {key: value for key, value in changes.items() if key in _VIT_FIELDS}
    rest = {key: value for key, value in changes.items() if key not in _VIT_FIELDS}
    if config.moe is not None and rest:
        router = rest.get("router", config.moe.router.name)
        for key in rest:
            if key not in ("router", *option_names(router)):
                raise no_option(router, key, _VIT_FIELDS, "model option")
        config = replace(config, moe=config.moe.change(**rest))
    elif rest:
        near = difflib.get_close_matches(next(iter(rest)), _VIT_FIELDS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown model option {next(iter(rest))!r}, did you mean {near!r}?")
    return replace(config, **vit)


def create_model(
    name: str, *, num_classes: int | None = 1000, image_size: int | tuple[int, int] = 224, **overrides: Any
) -> "VisionTransformer":
    """Build a freshly initialized model. Under `torch.device("meta")` it takes no memory.

    It warns of an image size that is no whole number of patches: the model does not see what is beyond the last.
    """
    from softmoe.models.embed import unseen_pixels
    from softmoe.models.vit import VisionTransformer

    model = VisionTransformer(model_config(name, num_classes=num_classes, image_size=image_size, **overrides))
    for said in unseen_pixels(model.config.image_shape, model.config.patch_size):
        warnings.warn(f"{name}: {said}", stacklevel=2)
    return model
