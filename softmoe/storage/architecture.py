"""Read a model's architecture from the plain values of its config.json, strictly. This file loads without torch."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from softmoe.models.config import TextConfig, TwoTowerConfig, ViTConfig
from softmoe.models.moe_config import MoEConfig, option_names, without_unused_options
from softmoe.moe.config import ROUTERS
from softmoe.storage.preprocessing import MOST_SIDE
from softmoe.storage.settings import check_keys, convert

Architecture = ViTConfig | TwoTowerConfig
_LEAST = {"num_classes": 0, "registers": 0, "end_token": 0, "blocks": 0, "merge": 0, "head_blocks": 0}
_MOST = {"depth": 1024, "image_size": MOST_SIDE, "patch_size": MOST_SIDE, "length": 1 << 16, "num_experts": 1 << 20}
_MOST_POSITIONS = 1 << 26  # numbers in a table of positions that is computed, not read


def parse_architecture(values: Mapping[str, Any]) -> Architecture:
    """Read the model that config.json describes. ValueError for unknown keys, wrong types and numbers no model has."""
    found: Architecture
    if not isinstance(values, Mapping) or "text" not in values:
        check_fields(values, ViTConfig, "architecture.")
        found = ViTConfig.from_dict(dict(values))
    else:
        check_keys(values, [f.name for f in fields(TwoTowerConfig)], "architecture.")
        check_fields(values["image"], ViTConfig, "architecture.image.")
        check_fields(values["text"], TextConfig, "architecture.text.")
        check_types(values, get_type_hints(TwoTowerConfig), "architecture.", but=("image", "text"))
        found = TwoTowerConfig.from_dict(dict(values))
    check_numbers(found.to_dict(), "architecture")
    image, _ = split_architecture(found)
    if image.positions == "sincos" and image.tokens * image.width > _MOST_POSITIONS:
        raise ValueError(f"the table of positions would have {image.tokens} rows of {image.width} numbers")
    return found


def check_numbers(values: Mapping[str, Any], path: str) -> None:
    """Raise a ValueError for a number that no model has, before anything is built with it."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_numbers(value, f"{path}.{key}")
            continue
        least, most = _LEAST.get(key, 1), _MOST.get(key, (1 << 31) - 1)
        for number in value if isinstance(value, list | tuple) else [value]:
            if type(number) is int and not least <= number <= most:
                raise ValueError(f"{path}.{key} is from {least} to {most}, not {number}")
            if type(number) is float and abs(number) > 1e6:
                raise ValueError(f"{path}.{key} is at most a million, not {number}")


def check_fields(values: Mapping[str, Any], kind: type[ViTConfig] | type[TextConfig], path: str) -> None:
    """Raise a ValueError for a key or a type that this config, or its router's, does not have."""
    check_keys(values, [f.name for f in fields(kind)], path)
    check_types(values, get_type_hints(kind), path, but=("moe",))
    if values.get("moe") is not None:
        check_keys(values["moe"], values["moe"], f"{path}moe.")
        moe = without_unused_options(values["moe"])
        check_keys(moe, ("router", *option_names(moe["router"])), f"{path}moe.")
        hints = get_type_hints(MoEConfig) | get_type_hints(ROUTERS[moe["router"]])
        check_types(moe, hints, f"{path}moe.", but=("router",))


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any], path: str, but: tuple[str, ...]) -> None:
    """Raise a ValueError for a value of another type than its hint, except for the keys `but`."""
    for key, value in values.items():
        if key not in but:
            convert(hints[key], value, path + key)


def split_architecture(architecture: Architecture) -> tuple[ViTConfig, TwoTowerConfig | None]:
    """Return the image tower, and both if there are two."""
    if isinstance(architecture, TwoTowerConfig):
        return architecture.image, architecture
    return architecture, None
