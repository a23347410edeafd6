"""`softmoe train RECIPE [--section.key value ...]`."""

import signal
from typing import Annotated

import tyro

from softmoe import recipes
from softmoe.train import Result, TrainConfig, train
from softmoe.train.describe import describe_run

USAGE = """usage: softmoe train RECIPE [--dry-run] [--section.key value ...]

RECIPE  one of: {names}
        or the path of a .py file with a function recipe() -> TrainConfig

softmoe train RECIPE --help lists every key with its value in that recipe."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(names=", ".join(recipes.names())))
        return 0 if argv else 2
    recipe, rest = argv[0], argv[1:]
    config, dry_run = parse(recipe, rest)
    if dry_run:
        print(describe_run(config))
        return 0
    return finish(train(config), recipe)


def parse(recipe: str, argv: list[str]) -> tuple[TrainConfig, bool]:
    default = recipes.load(recipe)

    def command(
        config: Annotated[TrainConfig, tyro.conf.arg(name="")] = default,
        dry_run: tyro.conf.FlagCreatePairsOff[bool] = False,
    ) -> tuple[TrainConfig, bool]:
        """Train a model from a recipe.

        Args:
            config: the run.
            dry_run: Print the settings, the cost and the memory needed, and stop.
        """
        return config, dry_run

    return tyro.cli(command, args=argv, prog=f"softmoe train {recipe}")


def finish(result: Result, recipe: str) -> int:
    """Say where things are. A run stopped by a signal gives the shell's usual code, 128 + the signal's number."""
    folder = result.folder
    if result.signal is not None:
        name = signal.Signals(result.signal).name
        print(f"stopped by {name} after step {result.step}; run the same command again to continue in {folder.path}")
        return 128 + result.signal
    for name, value in result.numbers.items():
        print(f"{name:<12} {value:.4f}")
    print(f"weights      {folder.checkpoints / 'last'}")
    print(f"metrics      {folder.metrics}")
    return 0
