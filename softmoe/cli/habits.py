"""Put what people type out of habit in the words of our settings, and say what to type where there is no such word.

The last part of a key is enough where only one key has it (--batch-size is --data.batch-size), other libraries' names
are known (--lr is --schedule.peak), a switch needs no value (--compile is --compile True), and what is done in another
way here gets the sentence that says how.
"""

import difflib
import mimetypes
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from softmoe import recipes
from softmoe.paths import home_path
from softmoe.storage.hub import holds_model, why_no_model

IMAGE_SIZE = "data.transform.image_size"
OTHER_NAMES = {
    "arch": "model.name",
    "bs": "data.batch_size",
    "clip_grad": "optim.clip_norm",
    "data": "data.train",
    "data_dir": "data.train",
    "data_path": "data.train",
    "dataset": "data.train",
    "depth": "model.depth",
    "experts": "model.num_experts",
    "gradient_accumulation_steps": "accumulate",
    "image_size": IMAGE_SIZE,
    "img_size": IMAGE_SIZE,
    "learning_rate": "schedule.peak",
    "lr": "schedule.peak",
    "mlp_dim": "model.mlp_dim",
    "model": "model.name",
    "name": "run_name",
    "num_experts": "model.num_experts",
    "num_workers": "data.workers",
    "opt": "optim.name",
    "optimizer": "optim.name",
    "save_every": "checkpoint.every",
    "scale_init": "model.scale_init",
    "slots": "model.slots_per_expert",
    "slots_per_expert": "model.slots_per_expert",
    "smoothing": "objective.label_smoothing",
    "warmup_steps": "schedule.warmup",
    "width": "model.width",
    "workers": "data.workers",
}
OTHER_WAYS = {
    "config": "the settings file is the recipe: softmoe train FILE.py, or softmoe train runs/NAME",
    "resume": "a stopped run continues by itself: give the same command again, or softmoe train runs/NAME",
    "weight_decay": "weight decay has a key for each kind of weight: --optim.kernel-decay (matrices), "
    "--optim.head-decay and --optim.scale-decay",
    "wd": "weight decay has a key for each kind of weight: --optim.kernel-decay (matrices), "
    "--optim.head-decay and --optim.scale-decay",
    "amp": "the precision is a key: --precision bfloat16",
    "bf16": "the precision is a key: --precision bfloat16",
    "fp16": "the precision is a key: --precision",
    "gpus": "one process a GPU: torchrun --nproc-per-node N -m softmoe train ...",
    "out": "a run goes to the folder RUNS/RUN_NAME: set --run-name (and --runs)",
    "output": "a run goes to the folder RUNS/RUN_NAME: set --run-name (and --runs)",
    "output_dir": "a run goes to the folder RUNS/RUN_NAME: set --run-name (and --runs)",
    "pretrained": "to start from a trained model: softmoe finetune MODEL DATA",
    "eval": "to evaluate a trained model: softmoe evaluate MODEL DATA",
    "verbose": "a run shows its progress by itself; --quiet shows less",
}
_TABLE = "--csv FILE writes a table, --features FILE the vectors, and --json prints all"
OTHER_OPTIONS: dict[str, dict[str, str]] = {"predict": {"out": _TABLE, "output": _TABLE}}  # by command


def translate(argv: list[str], keys: Collection[str], switches: Collection[str]) -> tuple[list[str], set[str]]:
    """Return the words with whole keys in them, and the keys. ValueError where a word may mean two of them."""
    found: list[str] = []
    given: set[str] = set()
    key = ""
    for index, word in enumerate("--verbose" if word == "-v" else word for word in argv):
        if not word.startswith("--") or word == "--":
            found += words_of_size(word) if key == IMAGE_SIZE else [word]
            continue
        name, equals, value = word[2:].partition("=")
        key = whole_key(name.replace("-", "_"), keys)
        given.add(key)
        if key == IMAGE_SIZE and equals:
            found += ["--data.transform.image-size", *words_of_size(value)]
            continue
        found.append(f"--{key.replace('_', '-')}{equals}{value}" if key in keys else word)
        alone = not equals and (index + 1 == len(argv) or argv[index + 1].startswith("--"))
        if key in switches and alone:
            found.append("True")
        if key == "log.wandb" and alone:
            raise ValueError("--wandb takes the name of a Weights & Biases project: --wandb NAME")
    return found, given


def whole_key(name: str, keys: Collection[str]) -> str:
    """Return the key that is meant, or the name as it is if it is like none: the parser then says what is near."""
    if name in keys:
        return name
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    if name in OTHER_WAYS:
        raise ValueError(f"there is no --{name.replace('_', '-')}: {OTHER_WAYS[name]}")
    ends = sorted(key for key in keys if key.endswith(f".{name}"))
    if len(ends) > 1:
        words = " or ".join(f"--{key.replace('_', '-')}" for key in ends)
        raise ValueError(f"--{name.replace('_', '-')} may mean {words}: write the whole key")
    return ends[0] if ends else name


def as_typed(message: str, argv: Sequence[str], keys: Collection[str]) -> str:
    """Put the flag that was typed before a message that begins with the whole key it stands for."""
    key = message.split(" ", 1)[0][2:].replace("-", "_")
    typed = [word.partition("=")[0] for word in argv if word.startswith("--") and word != "--"]
    names = {word[2:].replace("-", "_"): word for word in typed}
    short = next((word for name, word in names.items() if name != key and whole_key(name, keys) == key), None)
    return f"{short}: {message}" if short else message


def nearest(name: str, keys: Collection[str]) -> str | None:
    """Return the key that a misspelled word is most like, whole or by its last part; None if it is like none."""
    words = {*keys, *(key.rsplit(".", 1)[-1] for key in keys), *OTHER_NAMES}
    near = difflib.get_close_matches(name, sorted(words), n=1, cutoff=0.75)
    return near[0] if near else None


def parse_size(text: str) -> int | tuple[int, int]:
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"--image-size must be pixels or HEIGHTxWIDTH, like 224 or 224x320, got {text!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def words_of_size(text: str) -> list[str]:
    """Return 224 as one word and 224x320 as two, as tyro takes them."""
    size = parse_size(text)
    return [str(side) for side in (size if isinstance(size, tuple) else (size,))]


def check_options(argv: Sequence[str], command: str, places: Sequence[str], options: Collection[str]) -> None:
    """Raise ValueError for an option by another name, or for a word that is given by its place: --model MODEL."""
    for word in argv:
        name = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""
        if name in places:
            words = " ".join(place.upper() for place in places)
            raise ValueError(f"{word} is not needed, the place says it: softmoe {command} {words}")
        if name not in options and (way := OTHER_OPTIONS.get(command, {}).get(name)):
            raise ValueError(f"softmoe {command} has no --{name}: {way}")


def check_model(command: str, words: Sequence[str]) -> None:
    """Raise ValueError, without torch, if the first word cannot be a model; say so if another of the words is one."""
    first = words[0].partition("?")[0]
    paths = {word: home_path(word.partition("?")[0]) for word in words[1:]}
    model = next((word for word, path in paths.items() if word == "demo" or holds_model(path)), None)
    image = (mimetypes.guess_type(first)[0] or "").startswith("image/")
    why = why_no_model(first)
    if why is None and not (image and model):
        return
    if model is not None:
        others = [word for word in words if word != model]
        raise ValueError(f"MODEL comes first: softmoe {command} {shlex.join([model, *others])}")
    if first in recipes.names() and not Path("runs", first).exists():
        how = f"softmoe train {first} --data DATA trains a model, runs/{first}"
        raise ValueError(f"{first} is a recipe and has no weights: {how}")
    raise ValueError(why)
