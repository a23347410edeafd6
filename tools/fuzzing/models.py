"""Damaged folders of saved models, also with hashes that agree again."""

import contextlib
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzzing.cases import Case, Files, Set, Wrong, built, tree
from fuzzing.mutations import mutate_bytes, mutate_json


def save_models(folder: Path) -> None:
    import torch

    import softmoe
    from softmoe.data import open_source, some_captions, train_tokenizer
    from softmoe.models import TextConfig, TwoTower, TwoTowerConfig, create_model
    from softmoe.storage import TokenizerFile

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 16, "num_classes": 3, "width": 16, "heads": 2, "mlp_dim": 16, "depth": 2}
    for name in ("soft_ti8_4e", "vit_ti8", "tokens_choice_ti8_4e"):
        with contextlib.suppress(ValueError):  # names of models may change, those that there are serve
            softmoe.save_pretrained(create_model(name, **sizes), folder / name, classes=("cat", "dog", "eel"))
    model = create_model("soft_ti8_4e", **sizes)
    softmoe.save_pretrained(model, folder / "shards", max_shard_bytes=8000)
    tokenizer = train_tokenizer(some_captions(open_source("shapes", "train"), 100), 300)
    image = replace(model.config, num_classes=None)
    text = TextConfig(vocab_size=tokenizer.size, length=8, width=16, depth=1, mlp_dim=16, heads=2)
    towers = TwoTower(TwoTowerConfig(image, text))
    softmoe.save_pretrained(towers, folder / "towers", tokenizer=TokenizerFile(tokenizer.name, tokenizer.data))


def model_seeds(work: Path) -> dict[str, Files]:
    folder = built(work, "models", save_models)
    return {path.name: tree(path) for path in sorted(folder.iterdir())}


def restated(files: Files, list_name: str, place: Callable[[Any], dict[str, Any]]) -> Files:
    """The files with the hashes in their list made those of what they are now: what a careful forger does."""
    try:
        values = json.loads(files[list_name])
        for name, facts in place(values).items():
            if name in files:
                facts |= {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
        return files | {list_name: json.dumps(values).encode()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return files


def damaged(rng: random.Random, files: Files) -> Files:
    """One of the files damaged according to its kind; now and then removed, or another one's content."""
    name = rng.choice([n for n in files if n != "README.md"])
    if rng.random() < 0.03:
        return {n: d for n, d in files.items() if n != name}
    if rng.random() < 0.03:
        return files | {name: rng.choice(list(files.values()))}
    if name.endswith(".safetensors") and rng.random() < 0.6:
        return files | {name: damaged_safetensors(rng, files[name])}
    return files | {name: (mutate_json if name.endswith(".json") else mutate_bytes)(rng, files[name])}


def damaged_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A header of other names, types, shapes and offsets, of the right length; or values that are no numbers."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2:
        place = 8 + length + 4 * rng.randrange((len(data) - 8 - length) // 4)
        return data[:place] + rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", rng.randbytes(4))) + data[place + 4 :]
    header = mutate_json(rng, data[8 : 8 + length])
    if rng.random() < 0.3:
        kinds = (b"F32", b"F64", b"BF16", b"I64", b"BOOL", b"C64", b"U8", b"F8_E4M3")
        header = header.replace(b"F32", rng.choice(kinds), rng.choice((1, -1)))
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def model_make(rng: random.Random, seeds: dict[str, Files]) -> Case:
    files = damaged(rng, seeds[rng.choice(list(seeds))])
    if rng.random() < 0.5:
        files = restated(files, "config.json", lambda values: values["weights"]["files"])
    return Case(files)


def model_run(case: Case, folder: Path, _: Any) -> str:
    import torch
    from safetensors.torch import load_file

    from softmoe.evaluate import load_towers
    from softmoe.storage import load_saved, open_saved

    saved = open_saved(case.write(folder))
    model = load_saved(saved)
    for name, facts in saved.files.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != facts.sha256:
            raise Wrong(f"{name} was loaded although its hash is another")
    stored = {key: tensor for name in saved.files for key, tensor in load_file(folder / name).items()}
    for name, tensor in model.state_dict().items():
        key = name if name in stored else f"image.{name}"
        if tensor.dtype != stored[key].dtype or not torch.equal(tensor, stored[key]):
            raise Wrong(f"{name} is not what the file holds")
        if not tensor.isfinite().all():
            raise Wrong(f"{name} holds values that are no finite numbers")
    if saved.towers is not None:
        load_towers(folder, device="cpu").embed_texts(["a red star"])
    height, width = saved.config.image_shape
    if height * width <= 256 * 256:
        with torch.inference_mode():
            model.forward_features(torch.zeros(1, 3, height, width, dtype=next(model.parameters()).dtype))
    return "right"


MODELS = Set(model_seeds, model_make, model_run)
