"""Register our models with timm; importing this module does it, and needs the extra `timm`.

    import softmoe.timm, timm
    model = timm.create_model("softmoe_soft_s16_128e", num_classes=10, img_size=224)
    maps = timm.create_model("softmoe_soft_s16_128e", features_only=True, out_indices=(5, 11))

Names are ours with `softmoe_` in front (dots of timm's own would mean a set of weights). Nothing is downloaded.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from softmoe.models import create_model, list_models
from softmoe.models.conventions import POOLS

PREFIX = "softmoe_"
FACTS = {
    "input_size": (3, 224, 224),
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "num_classes": 1000,
    "pool_size": None,
    "first_conv": "embed.proj",
    "classifier": "head",
}
"""The facts that timm keeps about a model: its data pipeline asks for size, mean and deviation of the images."""


def make(name: str, pretrained: bool = False, **options: Any) -> Any:
    """Make the model called `name` from the arguments that timm passes to every model.

    With `features_only` it is in timm's wrapper, which returns the feature maps of the blocks `out_indices`: their
    numbers, or how many of the last, 3 if not given.
    """
    from timm.models import build_model_with_cfg  # pyright: ignore[reportMissingImports]

    if pretrained:
        raise ValueError(
            f"there are no weights to download for {name}: name a checkpoint of your own (timm's checkpoint_path, "
            "validate.py's --checkpoint), or load a saved model with softmoe.from_pretrained"
        )
    if options.get("features_only"):
        options["num_classes"] = 0
    if (size := options.get("img_size")) is not None:
        shape = (size, size) if isinstance(size, int) else tuple(size)
        options["pretrained_cfg_overlay"] = {"input_size": (3, *shape)} | (options.get("pretrained_cfg_overlay") or {})
    features = {"out_indices": 3, "feature_cls": "getter"}
    return build_model_with_cfg(partial(build, name), f"{PREFIX}{name}", False, feature_cfg=features, **options)


def build(name: str, *, global_pool: str | None = None, device: Any = None, dtype: Any = None, **options: Any) -> Any:
    """Make one of our models from the arguments of timm's model classes."""
    if global_pool is not None:
        options["pool"] = POOLS.get(global_pool, global_pool)
    with nullcontext() if device is None else torch.device(device):
        model = create_model(name, **options)
    c = model.config
    model.feature_info = [  # pyright: ignore
        {"num_chs": c.width, "reduction": c.patch_size, "module": f"encoder.blocks.{i}"} for i in range(c.depth)
    ]
    return model.to(dtype=dtype)


def register() -> list[str]:
    """Add every name of `list_models` to timm's registry and return the names there."""
    try:
        from timm.models import register_model  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("softmoe.timm needs timm: pip install 'softmoe-vit[timm]'") from error
    return [register_model(entry_point(name)).__name__ for name in list_models()]


def entry_point(name: str):
    """Make a function with the name and the module that timm's registry looks at."""

    def create(pretrained: bool = False, **options: Any) -> Any:
        return make(name, pretrained, **options)

    create.__name__ = create.__qualname__ = f"{PREFIX}{name}"
    create.__module__ = __name__
    globals()[create.__name__] = create  # pickling and timm's list of a module's models go by this
    return create


default_cfgs = {f"{PREFIX}{name}": FACTS for name in list_models()}  # timm's registry looks for it under this name
register()
