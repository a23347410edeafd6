"""Turn dataclasses into command lines and back, with tyro: this is the only file that knows how."""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

from softmoe.cli.habits import as_typed, check_model, check_options, nearest, parse_size, translate
from softmoe.evaluate.api import OneModel, TwoTowerModel, as_list
from softmoe.machine import is_first_process, use_threads
from softmoe.paths import check_new
from softmoe.storage.files import write_text

if TYPE_CHECKING:
    from softmoe.train import TrainConfig


Command = TypeVar("Command")
SIZE = int | tuple[int, int] | None


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
    command takes --threads. What --out names must not exist, unless the command goes on with what it finds there.
    """
    hints, given = get_type_hints(command), []
    own = fields(command)  # pyright: ignore[reportArgumentType]
    places = [f.name for f in own if not f.kw_only]
    check_options(argv, name, places, [f.name for f in own])
    for f in own:
        hint = word_type(hints[f.name])
        if not f.kw_only:
            hint = Annotated[hint, tyro.conf.Positional, tyro.conf.arg(metavar=f.name.upper())]
        given.append((f.name, hint, field(default=f.default, default_factory=f.default_factory, kw_only=f.kw_only)))
    count = Annotated[int | None, tyro.conf.arg(help="Processor threads; as torch chooses if not given.")]
    if "threads" not in hints:
        given.append(("threads", count, field(default=None, kw_only=True)))
    words = make_dataclass(command.__name__, given, bases=(command,), frozen=True)
    config = (tyro.conf.FlagCreatePairsOff,)
    try:
        found: Any = read_words(words, args=argv, prog=f"softmoe {name}", description=command.__doc__, config=config)
    except ValueError as error:
        if not str(error).startswith("Missing from "):
            raise
        needed = [f for f in own if f.default is MISSING and f.default_factory is MISSING]
        usage = " ".join(f"--{f.name} {f.name.upper()}" if f.kw_only else f.name.upper() for f in needed)
        raise ValueError(f"something is missing: softmoe {name} {usage} (softmoe {name} --help)") from None
    use_threads(found.threads)
    values = {f.name: getattr(found, f.name) for f in own}
    for key, value in values.items():
        if hints[key] == SIZE and value is not None:
            values[key] = parse_size(value)
    if not values.get("overwrite") and not getattr(command, "goes_on", False):
        check_new(values.get("out"), "--out", a_file=issubclass(command, Printed))
    if issubclass(command, OneModel | TwoTowerModel):
        check_model(name, [word for place in places for word in as_list(values[place] or ())])
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
    unfit = r"(?:no type matching .*? from|Could not find valid parse for arguments:) \[(.*?)\](?:\. Got errors.*?)?; "
    text = re.sub(rf"^Error parsing (\S+): {unfit}", r"\1 cannot be \2; ", text)
    text = re.sub(r" Perhaps you meant: (--[\w.\-]+).*(?= For full helptext)", r"; did you mean \1?", text)
    text = re.sub(r"^Error parsing config\.(\S+): ", r"\1: ", text)
    text = re.sub(r"^Missing value for argument '(\S+)'\. Expected 1 values?\.", r"\1 needs a value.", text)
    return re.sub(r"\s*For full helptext, (?:run|see):? (softmoe .*?--help)", r" (\1)", text)


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

    With another router the recipe's options that it does not have are left out. A `new` run is made to fit: --epochs
    becomes steps, and what was not given follows the number of steps; what changed is said.
    """
    from softmoe.train import ModelSection, TrainConfig
    from softmoe.train.fit import new_run, with_epochs
    from softmoe.train.model_section import model_options

    found, given = read_run(default, argv, prog)
    model = default.model
    settings = {
        name: value
        for name in model_options()
        if (value := getattr(found.config.model, name)) != model.options.get(name)
    }
    own = {f.name: getattr(found.config.model, f.name) for f in fields(ModelSection) if f.name != "options"}
    values = {f.name: getattr(found.config, f.name) for f in fields(TrainConfig)}
    values["model"] = model.change(**own, **settings)
    made = TrainConfig(**values)
    if not new:
        return with_epochs(made, found.epochs, given), found.dry_run
    made, said = new_run(made, default, given, found.epochs)
    for sentence in said if is_first_process() else ():
        print(f"softmoe: {sentence}", file=sys.stderr)
    return made, found.dry_run


def check_words(default: "TrainConfig", argv: list[str], prog: str) -> None:
    """Raise ValueError for words that say no setting of a run, before the defaults are known that a model gives.

    A help text waits for them: it shows their values.
    """
    if not {"-h", "--help"} & set(argv):
        read_run(default, argv, prog)


def read_run(default: "TrainConfig", argv: list[str], prog: str) -> tuple[Any, set[str]]:
    """Return the words of a run's command line as tyro reads them (config, epochs, dry_run), and the keys in them.

    The options of all routers stand among the settings of the model (--model.top-k), as the routers' configs declare
    and describe them.
    """
    from softmoe.moe.config import ROUTERS
    from softmoe.storage.settings import flatten
    from softmoe.train import ModelSection, TrainConfig
    from softmoe.train.model_section import model_options

    types = model_options()
    leaves = [
        c for c in ROUTERS.values() if not any(c is not other and issubclass(other, c) for other in ROUTERS.values())
    ]
    hidden = ("options", tyro.conf.Suppress[dict[str, Any]], field(default_factory=dict))
    shown = [(name, hint | None, None) for name, hint in types.items()]
    section = make_dataclass("Section", [hidden, *shown], bases=(ModelSection, *leaves), frozen=True)
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
    keys = [*values, *(f"model.{name}" for name in types), "epochs", "dry_run", "help"]
    words, given = translate(argv, keys, switches)
    for name in sorted(given.difference(keys)):
        if near := nearest(name, keys):
            typed, meant = (word.replace("_", "-") for word in (name, near))
            raise ValueError(f"there is no --{typed}, did you mean --{meant}? ({prog} --help)")
    model = default.model
    start = config(**vars(default) | {"model": section(**vars(model) | {"options": {}} | model.options)})
    options = {"description": "", "config": (tyro.conf.FlagCreatePairsOff,)}
    try:
        return read_words(arguments, args=words, prog=prog, default=arguments(start), **options), given
    except ValueError as error:
        raise ValueError(as_typed(str(error), argv, keys)) from None
