"""Turn dataclasses into command lines and back, with tyro: this is the only file that knows how.

What people type out of habit is put in the words of our settings. The last part of a key is enough where only one key
has it (--batch-size is --data.batch-size), other libraries' names are known (--lr is --schedule.peak), a switch needs
no value (--compile is --compile True), and what is done in another way here gets the sentence that says how.
"""

import contextlib
import io
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

from softmoe.machine import is_first_process, use_threads
from softmoe.storage.files import write_text

if TYPE_CHECKING:
    from softmoe.train import TrainConfig


Command = TypeVar("Command")
SIZE = int | tuple[int, int] | None
IMAGE_SIZE = "data.transform.image_size"


@dataclass(frozen=True, kw_only=True)
class Printed:
    """The options by which a command shows its report."""

    json: bool = False
    """Print everything as JSON."""
    out: Path | None = None
    """Also write everything to this JSON file, which must be new."""

    def show(self, report: dict[str, Any], text: str) -> None:
        whole = json.dumps(report, indent=2)
        if self.out:
            write_text(self.out, whole + "\n")
        print(whole if self.json else text)


def parse(command: type[Command], argv: list[str], name: str) -> Command:
    """Parse command line arguments into a command's dataclass.

    Positional fields are positional arguments, called like the field; keyword-only fields are options. A flag inverts
    its default, an image size is written 224 or 224x320, and each of several names is an argument of its own. Every
    command takes --threads. A file that --out names must not exist.
    """
    hints, given = get_type_hints(command), []
    for f in fields(command):  # pyright: ignore[reportArgumentType]
        hint = word_type(hints[f.name])
        if not f.kw_only:
            hint = Annotated[hint, tyro.conf.Positional, tyro.conf.arg(metavar=f.name.upper())]
        given.append((f.name, hint, field(default=f.default, default_factory=f.default_factory, kw_only=f.kw_only)))
    count = Annotated[int | None, tyro.conf.arg(help="Processor threads; as torch chooses if not given.")]
    if "threads" not in hints:
        given.append(("threads", count, field(default=None, kw_only=True)))
    words = make_dataclass(command.__name__, given, bases=(command,), frozen=True)
    config = (tyro.conf.FlagCreatePairsOff,)
    found: Any = read_words(words, args=argv, prog=f"softmoe {name}", description=command.__doc__, config=config)
    use_threads(found.threads)
    values = {f.name: getattr(found, f.name) for f in fields(command)}  # pyright: ignore[reportArgumentType]
    for key, value in values.items():
        if hints[key] == SIZE and value is not None:
            values[key] = parse_size(value)
    if not values.get("overwrite"):
        check_new(values.get("out"), "--out", a_file=issubclass(command, Printed))
    return command(**values)


def read_words(command: Any, **options: Any) -> Any:
    """Parse arguments with tyro; a mistake in them is a ValueError of one line, as all others are."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(command, **options)
    except SystemExit as end:
        if end.code != 2:
            raise
        raise ValueError(one_line(said.getvalue())) from None


def one_line(box: str) -> str:
    """Return a message that tyro prints in a box with a title as one line."""
    lines = [re.sub(r"[│╭╮╰╯]|[─-]{3,}|─", " ", line).strip() for line in box.splitlines()]
    text = " ".join(" ".join(filter(None, lines)).split())
    titles = ("Unrecognized options", "Required options", "Value error", "Invalid choice", "Parsing error")
    for title in (*titles, "Missing argument"):
        text = text.removeprefix(f"{title} ")
    text = text.replace(" Argument helptext:", ";").replace(" (required)", "")
    text = re.sub(
        r"^Error parsing (\S+): invalid literal for int.*?base 10: ", r"\1 must be a whole number, got ", text
    )
    text = re.sub(r"^Error parsing (\S+): could not convert string to float: ", r"\1 must be a number, got ", text)
    text = re.sub(
        r"^Error parsing (\S+): no type matching .*? from \[(.*?)\]\. Got errors.*?; ", r"\1 cannot be \2; ", text
    )
    text = re.sub(r"^Error parsing config\.(\S+): ", r"\1: ", text)
    text = re.sub(r"^Missing value for argument '(\S+)'\. Expected 1 values?\.", r"\1 needs a value.", text)
    return re.sub(r"\s*For full helptext, (?:run|see):? (softmoe .*?--help)", r" (\1)", text)


def check_new(path: str | Path | None, option: str, *, a_file: bool = True) -> None:
    """Raise ValueError for a file that is there already, and for a place where none can be made.

    With `a_file` a folder is refused too; without, the command writes into it.
    """
    if path is None:
        return
    path = Path(path)
    if path.is_file():
        raise ValueError(f"{path} is there already: choose another {option}, or remove it")
    if path.is_dir() and a_file:
        raise ValueError(f"{option} {path} is a folder; give the name of a new file")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if there != path and not can_write(there):
        why = "cannot be written to" if there.is_dir() else "is a file"
        raise ValueError(f"{option} {path} cannot be made: {there} {why}; choose another place")


def can_write(folder: Path) -> bool:
    """Tell if files can be made in a folder, by making a temporary one: permissions alone do not tell."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def unused_path(path: Path) -> Path:
    """Return the path or, if there is a file, the same with a number: evaluation_2.html."""
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


def word_type(hint: Any) -> Any:
    """Return the type that tyro parses in place of a field's own type."""
    if hint == SIZE:
        return str | None
    if hint == (str | Path | None):
        return Path | None
    if hint == (str | tuple[int, ...]):
        return str
    if {str, Path} <= set(get_args(hint)):
        return str if len(get_args(hint)) == 2 else tuple[str, ...]
    return hint


def parse_size(text: str) -> int | tuple[int, int]:
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"--image-size must be pixels or HEIGHTxWIDTH, like 224 or 224x320, got {text!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def words_of_size(text: str) -> list[str]:
    """Return 224 as one word and 224x320 as two, as tyro takes them."""
    size = parse_size(text)
    return [str(side) for side in (size if isinstance(size, tuple) else (size,))]


def percent_on_terminal(what: str) -> Callable[[int, int], None] | None:
    """Return a function of (done, all) that keeps one line on the terminal up to date.

    None where there is no terminal, so that nothing is written into logs and pipes.
    """
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r" if done < total else "\r\033[K"
        print(f"\r{what}: {done:,} of {total:,} images", end=end, file=sys.stderr, flush=True)

    return show


def parse_run(default: "TrainConfig", argv: list[str], prog: str, *, new: bool = True) -> "tuple[TrainConfig, bool]":
    """Return the settings of a run with what the command line changes, and whether it is a dry run.

    The options of all routers stand among the settings of the model (--model.top-k), as the routers' configs declare
    and describe them. With another router the recipe's options that it does not have are left out. A `new` run is made
    to fit: --epochs becomes steps, and what was not given follows the number of steps; what changed is said.
    """
    from softmoe.models.config import router_options
    from softmoe.moe.routing import ROUTERS
    from softmoe.storage.files import flatten
    from softmoe.train import ModelSection, TrainConfig
    from softmoe.train.folder import free_name
    from softmoe.train.preview import fit, steps_of

    types = {name: hint for name, hint in router_options().items() if name != "num_experts"}
    leaves = [
        c for c in ROUTERS.values() if not any(c is not other and issubclass(other, c) for other in ROUTERS.values())
    ]
    hidden = ("options", tyro.conf.Suppress[dict[str, Any]], field(default_factory=dict))
    options = [(name, hint | None, None) for name, hint in types.items()]
    section = make_dataclass("Section", [hidden, *options], bases=(ModelSection, *leaves), frozen=True)
    config = make_dataclass("Config", [("model", section)], bases=(TrainConfig,), frozen=True, kw_only=True)
    whole = Annotated[config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    dry = Annotated[bool, tyro.conf.arg(help="Print the settings, the cost and the memory needed, and stop.")]
    passes = Annotated[float | None, tyro.conf.arg(help="How often each training image is seen, instead of steps.")]
    arguments = make_dataclass(
        "Arguments", [("config", whole), ("epochs", passes, None), ("dry_run", dry, False)], frozen=True
    )

    values = flatten(TrainConfig().to_dict())
    hints = types | get_type_hints(ModelSection)
    switches = {key for key, value in values.items() if isinstance(value, bool)}
    switches |= {f"model.{name}" for name, hint in hints.items() if bool in (hint, *get_args(hint))}
    argv, given = translate(argv, [*values, *(f"model.{name}" for name in types), "epochs"], switches)
    model = default.model
    start = config(**vars(default) | {"model": section(**vars(model) | {"options": {}} | model.options)})
    found: Any = read_words(
        arguments,
        args=argv,
        prog=prog,
        default=arguments(start),
        description="",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    settings = {
        name: value for name in types if (value := getattr(found.config.model, name)) != model.options.get(name)
    }
    own = {f.name: getattr(found.config.model, f.name) for f in fields(ModelSection) if f.name != "options"}
    values = {f.name: getattr(found.config, f.name) for f in fields(TrainConfig)}
    values["model"] = model.change(**own, **settings)
    made = TrainConfig(**values)
    if {"epochs", "steps"} <= given:
        raise ValueError("give --epochs or --steps, not both: each says how long the run is")
    if found.epochs is not None:
        made = replace(made, steps=steps_of(found.epochs, made))
    if not new:
        return made, found.dry_run
    made, fitted = fit(made, default, given)
    made.check()
    made, placed = free_name(made, default, named="run_name" in given)
    for sentence in filter(None, (fitted, placed) if is_first_process() else ()):
        print(f"softmoe: {sentence}", file=sys.stderr)
    return made, found.dry_run


OTHER_NAMES = {
    "arch": "model.name",
    "bs": "data.batch_size",
    "clip_grad": "optim.clip_norm",
    "data": "data.train",
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
}


def translate(argv: list[str], keys: Collection[str], switches: Collection[str]) -> tuple[list[str], set[str]]:
    """Return the words with whole keys in them, and the keys. ValueError where a word may mean two of them."""
    found: list[str] = []
    given: set[str] = set()
    key = ""
    for index, word in enumerate(argv):
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
