"""`softmoe finetune`, `upcycle` and `soup`: models from models."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from softmoe import recipes
from softmoe.cli.habits import check_model, parse_size
from softmoe.cli.parse import check_words, parse, parse_run
from softmoe.cli.train import drive, take, take_foreign_options
from softmoe.transfer import Soup, Upcycle

if TYPE_CHECKING:
    from softmoe.train import TrainConfig


USAGE = """usage: softmoe finetune MODEL DATA [--image-size 384] [--adapters] [--dry-run] [--section.key value ...]

MODEL  a saved model, a run, a Hub id, or others' weights: an .npz or .safetensors file, or a folder with config.json.
       What a file alone does not tell: --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --heads 6 --activation gelu
DATA   a folder with CLASS/* (a tenth is kept for validation) or with train/CLASS/* and val/CLASS/*, or a source as in
       training

The head is new, unless the model knows just these classes; positions are resampled to the image size (any, also
HEIGHTxWIDTH), slots stay as they are.
--refit-head True ends with a head in closed form on four blocks, if that is better on validation images.
--adapters trains the head and narrow soft experts beside the MLPs, fewer than 5 % of the weights, and saves only them.
softmoe finetune MODEL DATA --help lists every setting. A stopped run continues with the same command."""


def finetune_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if len(argv) < 2 or argv[1].startswith("-"):
        raise ValueError("give the model and the data before the options: softmoe finetune MODEL DATA [--...]")
    return drive(*parse_finetune(argv[0], argv[1], argv[2:]))


def parse_finetune(model: str, data: str, argv: list[str]) -> tuple[TrainConfig, bool]:
    check_model("finetune", [model, data])
    size, rest = take(argv, "--image-size")
    told, rest = take_foreign_options(rest)
    adapters, rest = "--adapters" in rest, [word for word in rest if word != "--adapters"]
    image_size = parse_size(size) if size else None
    recipe, prog = recipes.load("finetune"), "softmoe finetune MODEL DATA"
    check_words(recipe, rest, prog)  # a slip of the keyboard shall not wait for torch

    from softmoe.convert.foreign import with_options
    from softmoe.transfer import transfer_config

    default = transfer_config(recipe, with_options(model, told), image_size=image_size, adapters=adapters)
    default = replace(default, data=replace(default.data, train=data))
    return parse_run(default, rest, prog)


def upcycle_command(argv: list[str]) -> int:
    a = parse(Upcycle, argv, "upcycle")
    check_model("upcycle", [a.dense])
    print(a.run(lambda line: print(line, file=sys.stderr, flush=True)))
    if a.init == "compare":
        print("nothing was saved: compare only compares; --init NAME --out FOLDER saves the model of one start")
    else:
        print("nothing was saved: --out FOLDER saves the model" if a.out is None else f"saved in {a.out}")
    return 0


def soup_command(argv: list[str]) -> int:
    a = parse(Soup, argv, "soup")
    for model in a.models:
        check_model("soup", [model])
    result = a.run(lambda line: print(line, file=sys.stderr, flush=True))
    if not a.greedy:
        print(f"averaged {len(result.kept)} models into {a.out}")
        return 0
    for index in sorted(range(len(a.models)), key=lambda index: -result.scores[index]):
        print(f"{result.scores[index]:.4f}  {'kept' if index in result.kept else 'left'}  {a.models[index]}")
    print(f"{result.score:.4f}  soup of {len(result.kept)}, in {a.out}")
    return 0
