"""Register our models with timm; importing this module does it, and needs the extra `timm`.

    import softmoe.timm, timm
    model = timm.create_model("softmoe_soft_s16_128e", num_classes=10, img_size=224)
    maps = timm.create_model("softmoe_soft_s16_128e", features_only=True, out_indices=(5, 11))

Names are ours with `softmoe_` in front (dots of timm's own would mean a set of weights). Nothing is downloaded.
"""

from collections.abc import Sequence
from typing import Any

from softmoe.models import create_model, list_models
from softmoe.models.conventions import POOLS

PREFIX = "softmoe_"


def make(
    name: str,
    pretrained: bool = False,
    *,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Make the model called `name` from the arguments that timm passes to every model.

    `img_size` is our image_size, `global_pool` our pool, and zero classes mean no head; timm's bookkeeping
    (pretrained_cfg and the like) is dropped. With `features_only` the model is in timm's wrapper, which returns the
    feature maps of the blocks `out_indices` (all if None). timm's data pipeline asks the model for the mean and
    deviation of the pixels.
    """
    if pretrained:
        raise ValueError(f"there are no weights to download for {name}: load your own with softmoe.from_pretrained")
    for key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        options.pop(key, None)
    if "img_size" in options:
        options["image_size"] = options.pop("img_size")
    if (pool := options.pop("global_pool", None)) is not None:
        options["pool"] = POOLS.get(pool, pool)
    if options.get("num_classes", 1000) == 0 or features_only:
        options["num_classes"] = None
    model = create_model(name, **options)
    size = (3, *model.config.image_shape)
    model.pretrained_cfg = {"input_size": size, "mean": (0.5,) * 3, "std": (0.5,) * 3}  # pyright: ignore
    if not features_only:
        return model
    from timm.models._features import FeatureGetterNet  # pyright: ignore[reportMissingImports]

    c = model.config
    model.feature_info = [  # pyright: ignore
        {"num_chs": c.width, "reduction": c.patch_size, "module": f"encoder.blocks.{i}"} for i in range(c.depth)
    ]
    return FeatureGetterNet(model, out_indices=list(range(c.depth)) if out_indices is None else out_indices)


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


register()
