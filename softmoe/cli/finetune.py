"""`softmoe finetune MODEL DATA --image-size 384`: the recipe `finetune` for a model of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from softmoe import recipes
from softmoe.cli.parse import parse_run, parse_size
from softmoe.cli.train import drive, take

if TYPE_CHECKING:
    from softmoe.train import TrainConfig

USAGE = """usage: softmoe finetune MODEL DATA [--image-size 384] [--adapters] [--dry-run] [--section.key value ...]

MODEL  a saved model, a run, a Hub id, or others' weights: an .npz or .safetensors file, or a folder with config.json.
       What a file alone does not tell: --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --heads 6 --activation gelu
DATA   a folder with CLASS/* (a tenth is kept for validation) or with train/CLASS/* and val/CLASS/*, or a source as in
       training

The head is new, positions are resampled to the image size (any, also HEIGHTxWIDTH), slots stay as they are.
--adapters trains the head and narrow soft experts beside the MLPs, fewer than 5 % of the weights, and saves only them.
softmoe finetune MODEL DATA --help lists every setting. A stopped run continues with the same command."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if len(argv) < 2 or argv[1].startswith("-"):
        raise ValueError("give a model and data: softmoe finetune MODEL DATA")
    return drive(*parse(argv[0], argv[1], argv[2:]))


def parse(model: str, data: str, argv: list[str]) -> tuple[TrainConfig, bool]:
    from softmoe.convert.foreign import with_options
    from softmoe.transfer import transfer_config

    size, rest = take(argv, "--image-size")
    given = {}
    for name in ("mean", "std", "heads", "activation"):  # of others' weights: kept with their path
        given[name], rest = take(rest, f"--{name}")
    model = with_options(model, given)
    adapters, rest = "--adapters" in rest, [word for word in rest if word != "--adapters"]
    image_size = parse_size(size) if size else None
    default = transfer_config(recipes.load("finetune"), model, image_size=image_size, adapters=adapters)
    default = replace(default, data=replace(default.data, train=data))
    return parse_run(default, rest, "softmoe finetune MODEL DATA")
