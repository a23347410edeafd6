"""Read models of other libraries from files, folders and Hub ids, with the settings stored beside the weights.

    open_foreign("dinov2-base")                                  a folder as on the Hub: config.json and safetensors
    open_foreign("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    open_foreign("vit.safetensors?mean=0.5&std=0.5&heads=3")     a file alone, with the settings it lacks

timm's config.json (pretrained_cfg), Hugging Face's with preprocessor_config.json, and open_clip_config.json tell heads,
activation, image size, pooling, and the mean and std of the pixels. Nothing pickled is opened.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softmoe.convert.names import IN_PLACE
from softmoe.convert.timm import from_timm, read_safetensors, read_tensors
from softmoe.convert.vit import from_vit
from softmoe.machine import choose_device
from softmoe.models import VisionTransformer
from softmoe.models.config import check_same_function
from softmoe.models.conventions import POOLS
from softmoe.paths import home_path
from softmoe.storage import Preprocessing, SavedModel, hub, load_saved, open_saved
from softmoe.storage.adapters import inherited
from softmoe.storage.files import check_names, first_line, read_json, sha256
from softmoe.storage.saved import is_saved

PICKLES = (".pth", ".pt", ".pth.tar", ".bin", ".ckpt", ".pkl")
_TANH = ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new")
_ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu"} | dict.fromkeys(_TANH, "gelu_tanh")
_FAMILIES: dict[str, dict[str, Any]] = {  # what Hugging Face's config.json leaves out
    "vit": {"num_attention_heads": 12, "image_size": 224, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
    "dinov2": {"num_attention_heads": 12, "image_size": 224, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
    "siglip": {"num_attention_heads": 12, "image_size": 224, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    "clip": {"num_attention_heads": 12, "image_size": 224, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}


@dataclass(frozen=True)
class Foreign(SavedModel):
    """A model of another library turned into ours: what a saved model tells, and the model itself.

    `folder` may be a file, and `files` is empty: nobody stated the hashes, so they are computed when first asked for.
    """

    model: VisionTransformer = field(kw_only=True)
    paths: dict[str, Path] = field(kw_only=True)  # of weight files, by name and the options given for it

    def hashes(self) -> dict[str, str]:
        return {name: hash_once(path, path.stat().st_mtime_ns) for name, path in self.paths.items()}


@cache
def hash_once(path: Path, _changed: int) -> str:
    """Return the SHA-256 of a file, computed once in a process unless the file was written anew since."""
    return sha256(path)


def open_foreign(where: str | Path, **options: Any) -> Foreign | None:
    """Read the model in a file, folder or on the Hub, with options of `from_timm` beside; None if softmoe saved it."""
    address, more = split_options(str(where))
    options = more | options
    place = locate(address)
    if place is None and options:
        raise ValueError(f"{', '.join(options)} can be given for files of others' weights only, not for {address}")
    if place is None:
        return None
    folder = place if place.is_dir() else place.parent
    has_settings = place.is_dir() or place.name.startswith(("model", "open_clip"))
    settings, files = read_settings(folder) if has_settings else ({}, [])
    tensors = read_safetensors(folder, files) if place.is_dir() else read_tensors(place)
    if any(not name.isprintable() or len(name) > 300 for name in tensors):
        raise ValueError(f"{place} is damaged: it has an array whose name is no text")
    ratio, crop = settings.pop("central_ratio", None), settings.pop("crop", "central")
    seen, classes = settings.pop("seen_size", None), settings.pop("classes", None)
    try:
        model = convert(tensors, settings | options, options)
    except (ArithmeticError, IndexError, KeyError, TypeError, RuntimeError) as error:  # of sizes that no model has
        raise ValueError(f"{place} does not hold the weights of a vision transformer: {first_line(error)}") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise ValueError(f"{place} holds values of {name} that are no finite numbers")
    shape = model.config.image_shape if seen is None or "image_size" in options else seen
    preprocessing = Preprocessing(shape, crop, ratio or Preprocessing.central_ratio)
    known = classes if classes and len(classes) == model.config.num_classes else None
    paths = {with_options(n, options): folder / n for n in (files if place.is_dir() else [place.name])}
    return Foreign(place, model.config, preprocessing, known, {}, model=model.eval(), paths=paths)


def convert(tensors: Mapping[str, Any], settings: dict[str, Any], asked: Mapping[str, Any]) -> VisionTransformer:
    """Choose the reader by the tensors' names: those of the original ViT and of big_vision have slashes."""
    if not any("/" in name for name in tensors):
        return from_timm(tensors, **settings)
    if set(asked) - {"image_size"}:
        raise ValueError(f"{', '.join(asked)}: files in the original ViT's naming tell all but image_size themselves")
    return from_vit(tensors, **asked)


def split_options(where: str) -> tuple[str, dict[str, Any]]:
    """Separate `path?heads=3&mean=0.5` into the path and its options."""
    address, _, query = where.partition("?")
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if key not in _OPTION_PARSERS or not equals:
            raise ValueError(
                f"{part!r} in {where!r} is not an option: write KEY=VALUE with {', '.join(_OPTION_PARSERS)}"
            )
        try:
            options[key] = _OPTION_PARSERS[key](value)
        except ValueError as error:
            raise ValueError(f"the option {key} in {where!r} cannot be {value!r}") from error
    return address, options


def with_options(where: str, options: Mapping[str, Any]) -> str:
    """Write options behind an address, as `split_options` reads them; those that are None are left out."""
    query = "&".join(f"{key}={value}" for key, value in options.items() if value is not None)
    return where + (f"{'&' if '?' in where else '?'}{query}" if query else "")


def _numbers(text: str) -> float | tuple[float, ...]:
    numbers = tuple(float(part) for part in text.split(","))
    return numbers[0] if len(numbers) == 1 else numbers


def _size(text: str) -> int | tuple[int, int]:
    sides = [int(part) for part in text.lower().split("x", 1)]
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


_OPTION_PARSERS: dict[str, Any] = {
    "mean": _numbers,
    "std": _numbers,
    "heads": int,
    "activation": str,
    "image_size": _size,
    "pool": str,
    "norm_eps": float,
}


def locate(address: str) -> Path | None:
    """Find the file or folder of another library's weights; None for a model that `open_saved` opens."""
    path = hub.model_path(address)
    if path.is_dir():
        return path if is_foreign(path) else None
    if path.name.endswith(PICKLES):
        raise ValueError(
            f"{path} is a pickle, which can run any code when it is read, so it was not opened: write its tensors with "
            "safetensors.torch.save_file(tensors, 'model.safetensors') and give that file"
        )
    if path.suffix in hub.WEIGHTS:
        if not path.is_file():
            raise ValueError(f"there is no file {address}")
        if path.name.startswith("model") and is_saved(path.parent):
            raise ValueError(f"{path} is a part of a saved model: give its folder, {path.parent}")
        return path
    if not path.exists() and hub.is_id(address) and not hub.others_there(path):
        folder = hub.download(address)
        return folder if is_foreign(folder) else None
    return None


def is_foreign(folder: Path) -> bool:
    """Tell if the folder has a config.json of timm or Hugging Face, or open_clip's."""
    if is_saved(folder):
        return False
    if (folder / "open_clip_config.json").is_file():
        return True
    try:
        config = read_json(folder / "config.json")
    except ValueError:
        return False
    return isinstance(config, dict) and (
        isinstance(config.get("architecture"), str) or isinstance(config.get("model_type"), str)
    )


def read_settings(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the folder's config as arguments of `from_timm`, and find the names of the files of its weights."""
    plain = folder / "model.safetensors"
    open_clip = folder / "open_clip_config.json"
    path = open_clip if open_clip.is_file() and not plain.is_file() else folder / "config.json"
    if not path.is_file():
        return {}, []
    try:
        config = read_json(path)
        if path == open_clip:
            settings = from_open_clip(config)
        else:
            settings = from_timm_config(config) if "architecture" in config else from_hugging_face(config, folder)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} does not describe a vision transformer: {first_line(error)}") from error
    files = [plain.name] if plain.is_file() else sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors file, and pickles are not opened: save the model as safetensors")
    return settings, files


def from_timm_config(config: dict[str, Any]) -> dict[str, Any]:
    """Read timm's config.json, with or without a table `pretrained_cfg` in it."""
    p, arguments = config.get("pretrained_cfg") or config, config.get("model_args") or {}
    name = config["architecture"]
    settings = mean_and_std(p) | {"image_size": pair(arguments.get("img_size") or p["input_size"][1:])}
    pool = arguments.get("global_pool") or config.get("global_pool") or p.get("global_pool")
    if pool:
        if pool not in POOLS:
            raise ValueError(f"{name} pools by {pool!r}, which our vision transformer does not")
        settings["pool"] = POOLS[pool]
    quick = "quickgelu" in name or "QuickGELU" in str(p.get("notes", ""))
    plain = "gelu_tanh" if "siglip" in name else "quick_gelu" if quick else "gelu"
    settings["activation"] = known_activation(arguments.get("act_layer") or plain, name)
    if "num_heads" in arguments or "giantopt" in name:  # SigLIP 2's giant is as wide as DINOv2's, with other heads
        settings["heads"] = checked(arguments.get("num_heads", 16), "num_heads", 1, 1 << 16)
    settings["central_ratio"] = max(1.0, 1.0 / checked(p.get("crop_pct", 0.875), "crop_pct", 0.01, 2.0))
    settings["crop"] = "resize" if p.get("crop_mode") == "squash" else "central"
    settings["classes"] = class_names(config.get("label_names") or p.get("label_names"))
    return settings


def mean_and_std(p: dict[str, Any], mean: str = "mean", std: str = "std") -> dict[str, Any]:
    """Return what is subtracted from pixels and what they are divided by, if both are stated."""
    return {"mean": tuple(p[mean]), "std": tuple(p[std])} if mean in p and std in p else {}


def known_activation(name: Any, where: object) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(f"{where} uses the activation {name!r}, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def from_hugging_face(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read Hugging Face's config.json, and preprocessor_config.json for the pixels."""
    kind = config["model_type"]
    family = next((name for name in _FAMILIES if kind.startswith(name)), None)
    if family is None:
        raise ValueError(f"{folder} is of the kind {kind!r}, which is none of {', '.join(_FAMILIES)}; {IN_PLACE}")
    vision = _FAMILIES[family] | (config.get("vision_config") or config)
    settings: dict[str, Any] = {
        "heads": checked(vision["num_attention_heads"], "num_attention_heads", 1, 1 << 16),
        "activation": known_activation(vision["hidden_act"], folder),
        "norm_eps": vision["layer_norm_eps"],
        "image_size": pair(vision["image_size"]),
        "classes": class_names(config.get("id2label")),
    }
    if (path := folder / "preprocessor_config.json").is_file():
        p = read_json(path)
        if p.get("do_normalize", True):
            settings |= mean_and_std(p, "image_mean", "image_std")
        size, cut = p.get("size"), p.get("crop_size")
        edge = size.get("shortest_edge") if isinstance(size, dict) else None
        if edge and p.get("do_center_crop", True) and cut:
            settings["seen_size"] = pair(cut)
            settings["central_ratio"] = max(
                1.0, checked(edge, "shortest_edge", 1, 1 << 16) / min(settings["seen_size"])
            )
        else:
            settings["crop"] = "resize"
    return settings


def from_open_clip(config: dict[str, Any]) -> dict[str, Any]:
    """Read open_clip_config.json."""
    model, pixels = config["model_cfg"], config.get("preprocess_cfg") or {}
    vision = model["vision_cfg"]
    settings: dict[str, Any] = {"image_size": pair(vision.get("image_size", 224)), "central_ratio": 1.0}
    if "width" in vision:
        settings["heads"] = vision["width"] // vision.get("head_width", 64)
    siglip = "siglip" in str(vision.get("timm_model_name", ""))
    settings["crop"] = "resize" if pixels.get("resize_mode") == "squash" else "central"
    settings["activation"] = "gelu_tanh" if siglip else "quick_gelu" if model.get("quick_gelu") else "gelu"
    return settings | mean_and_std(pixels)


def class_names(values: Any) -> tuple[str, ...] | None:
    """Read class names from a list or a table by number; None for made-up ones (LABEL_0)."""
    if isinstance(values, dict):
        values = [values[str(index)] for index in range(len(values)) if str(index) in values]
    if not isinstance(values, list) or not values or str(values[0]).startswith("LABEL_"):
        return None
    return check_names(map(str, values), "these weights")


def checked(value: Any, key: str, least: float, most: float) -> Any:
    """Return a number of others' settings; ValueError if it is none, or one that no model has."""
    if type(value) not in (int, float) or not least <= value <= most:  # also false for NaN
        raise ValueError(f"{key} is from {least} to {most}, not {value!r:.100}")
    return value


def pair(size: Any) -> tuple[int, int]:
    """Read height and width from one number, two, or a table."""
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def from_pretrained(
    where: str | Path,
    device: str | torch.device = "cpu",
    *,
    num_classes: int | None = None,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    revision: str | None = None,
    **options: Any,
) -> VisionTransformer:
    """Load a saved model, a run, a model on the Hub (`user/name`) or others' weights, in evaluation mode.

    Another `num_classes` than the model's gives it a fresh head, 0 none. Of two towers it is the image tower (both:
    `softmoe.evaluate.load_towers`). `device="meta"` gives the shapes alone, `dtype` converts; `verify=False` skips the
    checksums and the look for NaN, never the names, shapes and types. `options` are what a file of others' weights
    does not tell: mean, std, heads, activation, image_size, pool, norm_eps.
    """
    if revision is not None and not os.path.exists(home_path(where)):
        where = hub.download(str(where), revision)
    if found := open_foreign(where, **options):
        model = found.model.to(choose_device(str(device)), dtype)
    else:
        model = load_saved(open_saved(where), device, dtype=dtype, verify=verify)
    if num_classes is not None and num_classes != model.num_classes:
        model.reset_classifier(num_classes)
    return model.eval()


@torch.no_grad()
def starting_weights(model: VisionTransformer, weights: str | Path, *, new_head: bool = True) -> dict[str, Tensor]:
    """Return the state of `model` with the weights of a saved one, its positions resampled to the model's grid.

    Both must be alike but for image size and classes. Experts beside MLPs of a dense model keep their fresh weights.
    """
    source = from_pretrained(weights)
    check_same_function(source.config, model.config, str(weights))
    if not new_head and source.config.num_classes != model.config.num_classes:
        raise ValueError(
            f"the head of {weights} has {source.config.num_classes or 'no'} classes, the data has "
            f"{model.config.num_classes or 'none'}: start with a new head (model.new_head)"
        )
    head = {} if new_head else {name: t for name, t in source.state_dict().items() if name.startswith("head.")}
    return model.state_dict() | inherited(model, source) | head
