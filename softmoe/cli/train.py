"""`softmoe train RECIPE [--section.key value ...]`."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from softmoe import recipes
from softmoe.cli.parse import check_words, parse_run, read_words
from softmoe.evaluate.api import OthersWeights

if TYPE_CHECKING:
    from softmoe.train import Result, TrainConfig
    from softmoe.train.evaluation import Evaluator
    from softmoe.train.folder import RunFolder

USAGE = """usage: softmoe train RECIPE [--data DATA] [--steps N] [--dry-run] [--section.key value ...]

RECIPE  {names}
        the path of a .py file with a function recipe() -> TrainConfig
        the folder of a run, to continue it: runs/NAME
        a checkpoint, to cool down from it: runs/NAME/checkpoints/step_00001000 --cooldown 200
        lit --image MODEL, to learn texts for the images of a trained model that stays as it is; others' weights are
        taken as in softmoe finetune (--mean, --std)
DATA    a folder with CLASS/* or with train/CLASS/* and val/CLASS/*, or shapes, wds:PATTERN, hf:NAME, idx:PATH, digits

{about}

softmoe train RECIPE --help lists every key with its value in that recipe. Of a key the last part is enough where only
one has it: --batch-size, --lr, --epochs, --warmup, --compile. A run of fewer steps than the recipe's is made to fit.
A run stopped by Ctrl-C or SIGTERM saves first and exits with 130 or 143; the same command continues it."""


@dataclass(frozen=True)
class BranchArguments:
    """Start from a checkpoint of a run and take the learning rate to zero, in a new folder."""

    cooldown: int
    """Steps."""
    run_name: str | None = None
    """Folder of the branch; None is made of the run's name, the step and the cooldown."""
    runs: str | None = None
    """Folder above; None is that of the run."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the settings, the cost and the memory needed, and stop."""


def train_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        names = recipes.names()
        about = "\n".join(f"  {name:<24}{recipes.about(name)}" for name in names)
        print(USAGE.format(names=", ".join(names), about=about))
        return 0 if argv else 2
    if argv[0] == "--config" and len(argv) > 1:
        argv = argv[1:]
    if argv[0].startswith("-"):
        recipe, rest = take(argv, "--recipe")
        raise ValueError(f"the recipe comes first: softmoe train {shlex.join([recipe or 'small_data', *rest])}")
    return drive(*parse_train(argv[0], argv[1:]))


def drive(config: TrainConfig, dry_run: bool) -> int:
    """Train to the end and save the model: what `train` and `finetune` do in each process of a run."""
    from softmoe.data import WorkerDied
    from softmoe.train.preview import SMALLER_BATCH, preview

    if dry_run:
        print(preview(config))
        return 0
    try:
        result = train_as_asked(config)
        return finish(result) if result.rank == 0 else exit_code(result)
    except WorkerDied as error:
        raise OSError(str(error)) from error
    except RuntimeError as error:  # torch has a class of its own for this on accelerators only
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        raise OSError(f"out of memory: {SMALLER_BATCH}") from error


def train_as_asked(config: TrainConfig) -> Result:
    """Train with the evaluators that the settings ask for; a locked image tower runs only once."""
    from softmoe.evaluate import extract
    from softmoe.train import train

    return train(config, evaluators=more_evaluators(config), extract=extract if config.model.locked else None)


def parse_train(recipe: str, argv: list[str]) -> tuple[TrainConfig, bool]:
    prog = f"softmoe train {recipe}"
    if (Path(recipe) / "manifest.json").is_file():
        wanted = read_words(BranchArguments, args=argv, prog=prog)

        from softmoe.transfer import branch, plan_branch

        make = plan_branch if wanted.dry_run else branch
        return make(recipe, wanted.cooldown, wanted.run_name, wanted.runs), wanted.dry_run
    stored = Path(recipe).parent if Path(recipe).name == "config.json" else Path(recipe)
    begun = stored.is_dir() and (recipe not in recipes.names() or (stored / "config.json").is_file())
    if not begun and "/" in recipe and not recipe.endswith(".py"):
        from softmoe.storage.hub import others_there

        raise ValueError(f"there is no run {recipe}; {others_there(stored) or 'softmoe train lists the recipes'}")

    from softmoe.train import TrainConfig

    default = TrainConfig() if begun else recipes.load(recipe)
    if argv and not argv[0].startswith("-"):
        raise ValueError(f"{argv[0]!r} stands alone: data is given as softmoe train {recipe} --data {argv[0]}")
    image, rest = take(argv, "--image")
    told, rest = ({}, rest) if image is None else take_foreign_options(rest)
    if begun or image is not None:
        check_words(default, rest, prog)  # a slip of the keyboard shall not wait for torch
    if begun:
        default = stored_run(stored)
    if image is not None:
        from softmoe.convert.foreign import with_options
        from softmoe.transfer import locked_config

        default = locked_config(default, with_options(image, told))
    elif default.model.locked and default.model.weights is None and not {"-h", "--help"} & set(rest):
        raise ValueError(f"give the trained model whose images get texts: softmoe train {recipe} --image MODEL")
    return parse_run(default, rest, prog, new=not begun)


def more_evaluators(config: TrainConfig) -> Mapping[str, Evaluator] | None:
    """Return accuracy and few-shot accuracy, if the settings ask for the latter; None is the default."""
    if config.evaluation.fewshot is None:
        return None
    if config.text.size is not None:
        raise ValueError("evaluation.fewshot is for classifiers; use softmoe zeroshot on a model with a text tower")

    from softmoe.evaluate.probes import fewshot_evaluator
    from softmoe.storage import Preprocessing
    from softmoe.train.evaluation import classify

    few = fewshot_evaluator(config.evaluation.fewshot, Preprocessing.of(config.data.transform))
    return {"val": partial(classify, loss=config.objective.loss), "fewshot": few}


def stored_run(path: Path) -> TrainConfig:
    """Read the settings of a run, to continue it in the folder where it is now."""
    from softmoe.train.folder import RunFolder

    stored = RunFolder(path).stored()
    if stored is None:
        from softmoe.storage.hub import models_in

        images = f"to train on the images in it: softmoe train small_data --data {shlex.quote(str(path))}"
        raise ValueError(f"{path} is not the folder of a run: it has no config.json; {models_in(path) or images}")
    folder = path if path.name not in ("", "..") else path.resolve()
    return replace(stored[0], runs=str(folder.parent), run_name=folder.name)


def exit_code(result: Result) -> int:
    """Return 128 + the signal's number for a stopped run, as shells do, and 1 if its result could not be saved."""
    if result.signal is not None:
        return 128 + result.signal
    return 1 if result.problems else 0


def finish(result: Result) -> int:
    """Save the model and say where things are, with the step and the numbers of the checkpoint that became it."""
    from softmoe.transfer import write_finished

    folder = result.folder
    for problem in result.problems:
        print(f"softmoe: {problem}", file=sys.stderr)
    if result.signal is not None:
        name = signal.Signals(result.signal).name
        print(f"stopped by {name} after step {result.step}; to continue: softmoe train {folder.path}")
        return exit_code(result)
    step, _ = folder.chosen_numbers()
    model, numbers = write_finished(result)
    rows = {name: f"{value:.4f}" for name, value in numbers.items()}
    chosen = step < result.step and not result.problems  # else an older step is what could be saved
    best = f" of {result.step}, the best on validation images" if chosen else ""
    rows |= {"step": f"{step}{best}", "model": str(model.folder)}
    rows |= {"metrics": str(folder.metrics)}
    if folder.evaluation.exists():
        rows["evaluation"] = str(folder.evaluation)
    rows["report"] = report_page(folder)
    run = shlex.quote(str(folder.path))
    rows["next"] = f"softmoe predict {run} IMAGES" if model.towers is None else f"softmoe search {run} TEXT IMAGES"
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(f"{name:<{width}}{value}")
    return exit_code(result)


def report_page(folder: RunFolder) -> str:
    """Write the page of a run. Returns where it is, or why there is none: the run itself has succeeded."""
    from softmoe.report import load_run, write_report

    try:
        run = load_run(folder.path)
        if run.classes and run.config.text.size is None:
            judge(folder, run.config)
        return str(write_report([run], folder.path / "report.html"))
    except Exception as error:
        return f"none: {error}" if isinstance(error, ValueError) else f"none, {type(error).__name__}: {error}"


def judge(folder: RunFolder, config: TrainConfig) -> None:
    """Leave the mistakes of the finished model on the validation images in evaluation.json, for the page."""
    from softmoe.evaluate import evaluate
    from softmoe.storage.files import write_json

    d = config.data
    report = evaluate(
        folder.path / "model",
        d.val or d.train,
        split=d.val_split,
        examples=config.evaluation.examples,
        loss=config.objective.loss,
        batch_size=d.eval_batch_size,
        workers=d.workers if isinstance(d.workers, int) else 0,
        device=config.device,
    )
    write_json(folder.path / "evaluation.json", report)


def take(argv: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Return the value of a flag that shapes the defaults of the others, and the arguments without it."""
    for index, word in enumerate(argv):
        if word == flag:
            if index + 1 == len(argv):
                raise ValueError(f"{flag} needs a value")
            return argv[index + 1], argv[:index] + argv[index + 2 :]
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}="), argv[:index] + argv[index + 1 :]
    return None, argv


def take_foreign_options(argv: list[str]) -> tuple[dict[str, str | None], list[str]]:
    """Return what the arguments tell of others' weights, and the arguments without it."""
    options = {}
    for name in OthersWeights().foreign_options:
        options[name], argv = take(argv, f"--{name}")
    return options, argv
