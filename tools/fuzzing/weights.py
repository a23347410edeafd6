"""Damaged files of other people's weights."""

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing.cases import Case, Set, Wrong
from fuzzing.models import damaged_safetensors
from fuzzing.mutations import mutate_bytes


def weight_seeds(_: Path) -> list[tuple[str, Any]]:
    import torch

    from softmoe.convert import to_vmoe
    from softmoe.models import create_model

    torch.manual_seed(0)
    model = create_model("vit_ti8", image_size=16, num_classes=3, width=64, heads=1, mlp_dim=16, depth=1)
    linears = {"attn.qkv": (192, 64), "attn.proj": (64, 64), "mlp.fc1": (16, 64), "mlp.fc2": (64, 16)}
    shapes = {f"blocks.0.{name}.weight": shape for name, shape in linears.items()}
    shapes |= {"patch_embed.proj.weight": (64, 3, 8, 8), "head.weight": (3, 64)}
    shapes |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in shapes.items()}
    shapes |= {
        f"{norm}.{part}": (64,) for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm") for part in ("weight", "bias")
    }
    shapes |= {"cls_token": (1, 1, 64), "pos_embed": (1, 5, 64)}
    rng = np.random.default_rng(0)
    timm = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return [("timm", timm), ("vit", to_vmoe(model))]


def stored_npz(arrays: dict[str, np.ndarray], compression: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        for name, array in arrays.items():
            inner = io.BytesIO()
            np.save(inner, array)
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), inner.getvalue(), compression)
    return out.getvalue()


def weight_make(rng: random.Random, seeds: list[tuple[str, Any]]) -> Case:
    from safetensors.numpy import save

    kind, arrays = rng.choice(seeds)
    arrays = dict(arrays)
    if rng.random() < 0.7:  # arrays of other names, shapes and types in a whole file
        name = rng.choice(list(arrays))
        array = arrays.pop(name)
        change = rng.choice(("drop", "name", "shape", "type", "values", "empty", "cut"))
        if change == "name":
            arrays[mutate_bytes(rng, name.encode()).decode("ascii", "replace").replace("\0", "")] = array
        elif change == "shape":
            arrays[name] = array.reshape(rng.choice(((-1,), (1, *array.shape), array.shape[::-1], (-1, 1))))
        elif change == "type":
            arrays[name] = array.astype(rng.choice((np.int64, np.bool_, np.float16, np.uint8, np.float64, np.int32)))
        elif change == "values":
            arrays[name] = array * rng.choice((np.nan, np.inf, 1e30))
        elif change == "empty":
            arrays[name] = array[:0]
        elif change == "cut":
            arrays[name] = np.ascontiguousarray(array[..., : max(1, array.shape[-1] // 2)]) if array.ndim else array
    if kind == "timm" and rng.random() < 0.6:
        data = save({n: np.ascontiguousarray(a) for n, a in arrays.items()})
        name = "x.safetensors"
        data = damaged_safetensors(rng, data) if rng.random() < 0.3 else data
    else:
        data, name = stored_npz(arrays, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))), "x.npz"
    return Case({name: mutate_bytes(rng, data) if rng.random() < 0.4 else data})


def weight_run(case: Case, folder: Path, _: Any) -> str:
    from softmoe.convert.foreign import from_pretrained

    (name,) = case.files
    path = case.write(folder) / name
    try:
        model = from_pretrained(path, mean=0.5, std=0.5)
    except ValueError as error:
        if "tell all but image_size" not in str(error):
            raise
        model = from_pretrained(path)
    for key, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise Wrong(f"{key} holds values that are no finite numbers")
    return "right"


WEIGHTS = Set(weight_seeds, weight_make, weight_run)
