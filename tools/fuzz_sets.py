"""What the fuzzer tries: each set makes damaged inputs from good ones and hands them to the package as a user would.

A set builds its good inputs once (`prepare`), makes the input number i from a generator seeded by (seed, set, i)
(`make`), and runs it (`run`). `run` returns "right", or raises: ValueError and OSError with one line are the sentence
that a user gets, `Wrong` is a result that should not have been given, everything else is a defect.
"""

import contextlib
import ctypes
import fcntl
import gzip
import hashlib
import io
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_mutations import mutate_bytes, mutate_json, mutate_words
from PIL import Image

Files = dict[str, bytes]
SOCKET_SECONDS = 15


class Wrong(Exception):
    """A result that should have been an error: something was loaded other than what was saved."""


@dataclass
class Case:
    """One input: files by their names, and what is done with them."""

    files: Files
    call: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return folder


@dataclass
class Set:
    """One kind of input. `seconds` and `megabytes` (above what the process had before) bound what an input may cost."""

    prepare: Callable[[Path], Any]
    make: Callable[[random.Random, Any], Case]
    run: Callable[[Case, Path, Any], str]
    seconds: float = 20.0
    megabytes: int = 500


def tree(folder: Path) -> Files:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def built(folder: Path, name: str, build: Callable[[Path], None]) -> Path:
    """A folder that several processes need: the first builds it, the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = folder / f".{name}.partial"
            build(partial)
            partial.rename(target)
    return target


def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (4, 3, 4, 3), dtype=np.uint8)
    return [np.asarray(Image.fromarray(c).resize((40, 30), Image.Resampling.BICUBIC)) for c in coarse]


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


# images


def image_seeds(_: Path) -> list[bytes]:
    first, *others = [Image.fromarray(p) for p in pictures()]
    exif = Image.Exif()
    exif[0x0112] = 6
    gray, palette, wide = first.convert("L"), first.quantize(16), Image.fromarray(np.arange(64, dtype=np.uint16)[None])
    found = [encoded(first, form) for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    found += [encoded(first, "JPEG", **o) for o in ({"progressive": True}, {"exif": exif}, {"quality": 30})]
    found += [encoded(first.convert("CMYK"), "JPEG"), encoded(gray, "JPEG"), encoded(first, "JPEG", subsampling=0)]
    found += [encoded(i, "PNG") for i in (gray, palette, wide, first.convert("RGBA"), first.convert("1"))]
    found += [encoded(first, form, save_all=True, append_images=others) for form in ("GIF", "WEBP", "TIFF", "PNG")]
    found += [encoded(first, "TIFF", compression=c) for c in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")]
    found += [encoded(first.convert("1"), "TIFF", compression="group4"), encoded(gray.convert("F"), "TIFF")]
    found += [encoded(palette, "BMP"), encoded(gray, "PPM"), encoded(first, "WEBP", lossless=True)]
    rle = b"\x05\x01\x00\x00" * 30 + b"\0\1"  # rows of one run each
    head = (40).to_bytes(4, "little") + (5).to_bytes(4, "little") + (30).to_bytes(4, "little") + b"\1\0\x08\0\1\0\0\0"
    found += [
        b"BM"
        + (0).to_bytes(8, "little")
        + (62).to_bytes(4, "little")
        + head
        + bytes(12)
        + b"\2\0\0\0" * 2
        + bytes(8)
        + rle
    ]
    return found


def image_make(rng: random.Random, seeds: list[bytes]) -> Case:
    data = mutate_bytes(rng, rng.choice(seeds))
    if rng.random() < 0.02:  # one within or behind another
        data += rng.choice(seeds)
    return Case({"image": data}, {"min_side": rng.choice((None, 1, 20, 64))})


def image_run(case: Case, _: Path, seeds: Any) -> str:
    from softmoe.data.decode import MAX_PIXELS, decode

    image = decode(case.files["image"], "image", case.call["min_side"])
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size > 3 * MAX_PIXELS:
        raise Wrong(f"an image of {image.shape} {image.dtype}")
    return "right"


# archives


def packed_tar(files: Files, form: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def archive_seeds(_: Path) -> list[Case]:
    small = [encoded(Image.fromarray(p).resize((12, 10)), "JPEG") for p in pictures()]
    tree = {f"train/{c}/{i}.jpg": small[i] for c in ("a", "b") for i in (0, 1)} | {
        "classes.json": b'{"a": "ant", "b": "bee"}'
    }
    parts: Files = {}
    for i, data in enumerate(small):
        facts = json.dumps({"label": [i, 0], "caption": "a star"} if i % 2 else {"label": [i], "captions": ["a", "b"]})
        parts |= {f"k{i}.jpg": data, f"k{i}.json": facts.encode(), f"k{i}.txt": b"a cat\na dog\n"}
    labelled = {
        f"k{i}.{kind}": data for i, image in enumerate(small) for kind, data in (("jpg", image), ("cls", b"%d" % i))
    }
    long = {f"{'deep/' * 30}{name}": data for name, data in labelled.items()}
    idx = {
        "train-images-idx3-ubyte": b"\0\0\x08\x03" + b"".join(n.to_bytes(4) for n in (5, 6, 7)) + bytes(210),
        "train-labels-idx1-ubyte": b"\0\0\x08\x01" + (5).to_bytes(4) + bytes(range(5)),
    }
    pairs = {"train/a.jpg": small[0], "train/a.txt": b"a cat", "train/x/b.jpg": small[1]}
    uri = "wds:{folder}/{{split}}.tar"
    forms = [(labelled, tarfile.USTAR_FORMAT), (parts, tarfile.PAX_FORMAT), (long, tarfile.GNU_FORMAT)]
    found = [Case({"train.tar": packed_tar(*form)}, {"uri": uri}) for form in forms]
    found += [
        Case({"train.tar": packed_tar(long, tarfile.PAX_FORMAT), "classes.json": b'["ant", "bee"]'}, {"uri": uri})
    ]
    found += [Case({"train.tar.gz": gzip.compress(packed_tar(labelled))}, {"uri": uri + ".gz"})]
    found += [
        Case({"x.tar": packed_tar(tree)}, {"uri": "folder:{folder}/x.tar"}),
        Case(tree, {"uri": "folder:{folder}"}),
    ]
    found += [Case(idx, {"uri": "idx:{folder}"}), Case(pairs, {"uri": "pairs:{folder}"})]
    found += [Case({f"{n}.gz": gzip.compress(d) for n, d in idx.items()}, {"uri": "idx:{folder}"})]
    return found


def archive_make(rng: random.Random, seeds: list[Case]) -> Case:
    seed = rng.choice(seeds)
    name = rng.choice(list(seed.files))
    data = seed.files[name]
    if name.endswith(".gz") and rng.random() < 0.7:  # damage under the compression
        return Case(seed.files | {name: gzip.compress(mutate_bytes(rng, gzip.decompress(data)), 1)}, seed.call)
    if name.endswith(".tar") and rng.random() < 0.7:  # a damaged header whose checksum is right
        block = bytearray(data)
        at = 512 * rng.randrange(len(data) // 512)
        block[at : at + 512] = mutate_bytes(rng, bytes(block[at : at + 512])).ljust(512, b"\0")[:512]
        block[at + 148 : at + 156] = b"        "
        block[at + 148 : at + 156] = b"%06o\0 " % sum(block[at : at + 512])
        return Case(seed.files | {name: bytes(block)}, seed.call)
    change = mutate_json if name.endswith(".json") else mutate_bytes
    return Case(seed.files | {name: change(rng, data)}, seed.call)


def archive_run(case: Case, folder: Path, _: Any) -> str:
    from softmoe.data import BrokenImage, captions_of, open_source

    os.environ["SOFTMOE_CACHE"] = str(folder / "cache")
    source = open_source(case.call["uri"].format(folder=case.write(folder)), "train")
    for index in range(min(len(source), 50)):
        with contextlib.suppress(BrokenImage):
            example = source.read(index)
            if any(not 0 <= label < len(source.classes) for label in example.labels):
                raise Wrong(f"the labels {example.labels} of {len(source.classes)} classes")
    captions_of(source, range(min(len(source), 50)))
    return "right"


# saved models


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


# checkpoints and runs


def train_run(folder: Path) -> None:
    from softmoe import recipes
    from softmoe.train import train

    config = recipes.load("quickstart", "tiny")
    config = replace(
        config,
        run_name="run",
        runs=str(folder),
        steps=4,
        ema=0.9,
        evaluation=replace(config.evaluation, every=2, examples=8),
        checkpoint=replace(config.checkpoint, every=2, keep_last=1, keep_best=False, asynchronous=False),
        log=replace(config.log, every=1, quiet=True),
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train(config)


@dataclass
class RunSeeds:
    checkpoint: Files
    run: Files
    model: Any
    optimizer: Any


def run_seeds(work: Path) -> RunSeeds:
    from softmoe.storage import load_saved, open_saved
    from softmoe.train import TrainConfig
    from softmoe.train.optim import make_optimizer

    run = built(work, "runs", train_run) / "run"
    folder = next(path for path in sorted(run.glob("checkpoints/step_*")))
    model = load_saved(open_saved(folder)).train()
    config = TrainConfig.from_dict(json.loads((run / "config.json").read_text())["train"])
    plain = {name: data for name, data in tree(run).items() if not name.startswith("checkpoints")}
    return RunSeeds(tree(folder), plain, model, make_optimizer(model, config.optim))


def checkpoint_make(rng: random.Random, seeds: RunSeeds) -> Case:
    files = damaged(rng, seeds.checkpoint)
    if rng.random() < 0.5:
        files = restated(files, "manifest.json", lambda values: values["files"])
    return Case(files)


def checkpoint_run(case: Case, folder: Path, seeds: RunSeeds) -> str:
    """Read, restore into a model and an optimizer, and make a step: wrong sizes in compiled code would show here."""
    import copy

    import torch

    from softmoe.storage import open_saved, read_checkpoint
    from softmoe.storage.checkpoint import restore

    place = case.write(folder / "run" / "checkpoints" / "step_00000004")
    found = read_checkpoint(place)
    open_saved(place)
    model, optimizer = copy.deepcopy((seeds.model, seeds.optimizer))
    restore(found, model, optimizer, copy.deepcopy(model))
    if case.files["manifest.json"] == seeds.checkpoint["manifest.json"]:
        wrong = [name for name, data in case.files.items() if data != seeds.checkpoint.get(name)]
        if wrong:
            raise Wrong(f"{wrong[0]} is another than was saved")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return "right"


def run_make(rng: random.Random, seeds: RunSeeds) -> Case:
    return Case(damaged(rng, seeds.run))


def run_run(case: Case, folder: Path, seeds: RunSeeds) -> str:
    from softmoe.report import load_run, summary_table
    from softmoe.train.folder import RunFolder

    case.write(folder)
    record = load_run(folder)
    RunFolder(folder).stored()
    summary_table([record])
    return "right"


# others' weights


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
    from softmoe.convert.foreign import read_model

    (name,) = case.files
    path = case.write(folder) / name
    try:
        model = read_model(path, mean=0.5, std=0.5)
    except ValueError as error:
        if "tell all but image_size" not in str(error):
            raise
        model = read_model(path)
    for key, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise Wrong(f"{key} holds values that are no finite numbers")
    return "right"


# tokenizers


def save_tokenizers(folder: Path) -> None:
    from softmoe.data import open_source, some_captions, train_tokenizer

    folder.mkdir()
    texts = list(some_captions(open_source("shapes", "train"), 300))
    for kind in (".json", ".model"):
        (folder / f"tokenizer{kind}").write_bytes(train_tokenizer(texts, 320, kind).data)


def tokenizer_seeds(work: Path) -> Files:
    return tree(built(work, "tokenizers", save_tokenizers))


def tokenizer_make(rng: random.Random, seeds: Files) -> Case:
    name = rng.choice(list(seeds))
    change = mutate_json if name.endswith(".json") and rng.random() < 0.8 else mutate_bytes
    return Case({name: change(rng, seeds[name])})


def tokenizer_run(case: Case, _: Path, seeds: Any) -> str:
    from softmoe.data import Tokenizer

    ((name, data),) = case.files.items()
    tokenizer = Tokenizer(name, data)
    numbers = tokenizer.encode(["a red star", "", "\x00é世 " * 50], 8)
    if numbers.shape != (3, 8) or not 0 <= int(numbers.min()) <= int(numbers.max()) < tokenizer.size:
        raise Wrong(f"numbers from {int(numbers.min())} to {int(numbers.max())} of {tokenizer.size}")
    tokenizer.decode(numbers[0].tolist())
    return "right"


# command lines and recipes

RECIPE = """from dataclasses import replace
from softmoe import recipes
from softmoe.train import TrainConfig

def recipe() -> TrainConfig:
    config = recipes.load("quickstart")
    return replace(config, steps=10, ema=0.9, threads=1, optim=replace(config.optim, eps=1e-8, head_decay=0.1))
"""


@dataclass
class LineSeeds:
    files: Files
    lines: list[list[str]]


def line_seeds(work: Path) -> LineSeeds:
    models = model_seeds(work)
    run = run_seeds(work).run
    files = {f"model/{n}": d for n, d in models["soft_ti8_4e"].items()}
    files |= {f"dense/{n}": d for n, d in models["vit_ti8"].items()}
    files |= {f"towers/{n}": d for n, d in models["towers"].items()} | {f"run/{n}": d for n, d in run.items()}
    files |= {f"photos/{i}.png": encoded(Image.fromarray(p), "PNG") for i, p in enumerate(pictures())}
    files |= {f"set/{s}/{c}/{i}.png": files[f"photos/{i}.png"] for s in ("train", "val") for i in (0, 1) for c in "ab"}
    files |= {"mine.py": RECIPE.encode(), "labels.json": b'{"0": [0], "1": [1]}', "names.json": b'["cat", "dog"]'}
    files |= {"tokenizer.json": models["towers"]["tokenizer.json"]}
    text = """predict model photos --top 2 --json
predict model photos/0.png photos/*.png --image-size 24x16 --batch-size 2
predict model set --features out.npy --weights int8
evaluate model set --labels labels.json --batch-size 2 --json
fewshot model set --shots 1 --seeds 1 --no-cache
search towers red photos --top 1 --json
zeroshot towers set --classes names.json --no-cache --json
retrieve towers shapes --examples 4 --no-cache
tokenizer show tokenizer.json star --length 4
cost soft_s16_128e --image-size 224
cost vit_b16 --json
plan soft_s16_128e --devices 8
report run --output out.html
doctor model
soup model model --out soup
upcycle dense --experts 2 --out up
train mine.py --dry-run
train quickstart --dry-run --steps 5 --optim.head-decay 0.1 --data.train shapes?size=32
train run --dry-run
evaluate model set --examples 3 --image-size 16
--help
--version
nothing"""
    return LineSeeds(files, [line.split() for line in text.splitlines()])


def line_make(rng: random.Random, seeds: LineSeeds) -> Case:
    words = rng.choice(seeds.lines)
    if rng.random() < 0.15:
        name = rng.choice(("mine.py", "labels.json", "names.json"))
        change = mutate_json if name.endswith(".json") else mutate_bytes
        given = {"mine.py": 16, "labels.json": 3, "names.json": 6}[name]
        return Case({name: change(rng, seeds.files[name])}, {"argv": seeds.lines[given]})
    argv = mutate_words(rng, words)
    if "train" in argv and "--dry-run" not in argv:
        argv.append("--dry-run")  # training itself is not what is tried here
    if argv and argv[0] in ("bench", "quickstart", "serve", "study", "finetune", "export"):
        argv = argv[1:]
    return Case({}, {"argv": argv})


def line_run(case: Case, folder: Path, seeds: LineSeeds) -> str:
    from softmoe.cli import main

    Case(seeds.files | case.files).write(folder)
    os.environ["SOFTMOE_CACHE"] = str(folder / "cache")
    out, err, here = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(folder)
    exited = False
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(case.call["argv"])
    except SystemExit as end:  # the parser's own words fill several lines
        code, exited = end.code, True
    finally:
        os.chdir(here)
    if code not in (0, 1, 2, None):
        raise Wrong(f"exit code {code}")
    said = err.getvalue() or out.getvalue()  # without a word of its own the command prints its usage
    if "Traceback" in said or (code == 2 and not exited and said.count("softmoe: error:") != 1 and case.call["argv"]):
        raise Wrong(f"exit code {code}: {said[-500:]}")
    if code == 2:
        raise ValueError(said.strip().splitlines()[-1] if said.strip() else "")
    return "right"


# HTTP


@dataclass
class Served:
    port: int
    requests: list[bytes]
    process: subprocess.Popen


def end_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def http_seeds(work: Path) -> Served:
    model = built(work, "models", save_models) / "soft_ti8_4e"
    command = [sys.executable, "-m", "softmoe", "serve", str(model), "--port", "0", "--threads", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=end_with_parent
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().rsplit(":", 1)[1])
    image = encoded(Image.fromarray(pictures()[0]), "JPEG")
    form = b'--xx\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n' + image + b"\r\n--xx--\r\n"
    head = "POST /{} HTTP/1.1\r\nHost: x\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n"
    found = [head.format(p, "image/jpeg", len(image)).encode() + image for p in ("classify", "embed")]
    found += [head.format("classify", "multipart/form-data; boundary=xx", len(form)).encode() + form]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (image[:500], image[500:])) + b"0\r\n\r\n"
    found += [b"POST /classify HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks]
    found += [b"GET /%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % p for p in (b"health", b"metrics", b"x")]
    return Served(port, found, process)


def http_make(rng: random.Random, seeds: Served) -> Case:
    request = rng.choice(seeds.requests)
    head, end, body = request.partition(b"\r\n\r\n")
    match rng.randrange(3):
        case 0:
            request = mutate_bytes(rng, head) + end + body
        case 1:
            request = head + end + mutate_bytes(rng, body)
        case _:
            request = mutate_bytes(rng, request)
    return Case({"request": request})


def http_run(case: Case, _: Path, seeds: Served) -> str:
    answer = exchange(seeds.port, case.files["request"])
    if seeds.process.poll() is not None:
        raise Wrong(f"the service ended with {seeds.process.returncode}")
    if not answer:  # closed without a word: the request was not whole
        return "right"
    status = int(answer.split(b" ", 2)[1])
    if status == 500 or not 100 <= status < 600:
        raise Wrong(f"status {status}: {answer[:300]!r}")
    if b"Traceback" in answer:
        raise Wrong("a traceback in the answer")
    if status >= 400:
        raise ValueError(f"status {status}")
    return "right"


def exchange(port: int, request: bytes) -> bytes:
    found = b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=SOCKET_SECONDS) as link,
        contextlib.suppress(ConnectionError),
    ):
        link.sendall(request)
        link.shutdown(socket.SHUT_WR)
        while chunk := link.recv(65536):
            found += chunk
    return found


# what a defect looks like, for the fuzzer's own tests


def planted_run(case: Case, folder: Path, _: Any) -> str:
    match case.call["kind"]:
        case "right":
            return "right"
        case "sentence":
            raise ValueError("one line")
        case "paragraph":
            raise ValueError("one line\nand another")
        case "traceback":
            raise KeyError("x")
        case "wrong":
            raise Wrong("other weights")
        case "memory":
            return str(len(bytearray(600_000_000)))[:0] + "right"
        case "crash":
            os.abort()
        case _:
            while True:
                math.sqrt(2)


def planted_make(rng: random.Random, kinds: list[str]) -> Case:
    return Case({"x": b""}, {"kind": rng.choice(kinds)})


KINDS = ["right", "sentence", "paragraph", "traceback", "wrong", "memory", "crash", "hang"]
SETS: dict[str, Set] = {
    "images": Set(image_seeds, image_make, image_run, megabytes=1500),
    "archives": Set(archive_seeds, archive_make, archive_run),
    "models": Set(model_seeds, model_make, model_run),
    "checkpoints": Set(run_seeds, checkpoint_make, checkpoint_run),
    "runs": Set(run_seeds, run_make, run_run),
    "weights": Set(weight_seeds, weight_make, weight_run),
    "tokenizers": Set(tokenizer_seeds, tokenizer_make, tokenizer_run),
    "lines": Set(line_seeds, line_make, line_run, seconds=60),
    "http": Set(http_seeds, http_make, http_run, seconds=40),
}
PLANTED = Set(lambda _: KINDS, planted_make, planted_run, seconds=2)
