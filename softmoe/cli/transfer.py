"""`softmoe finetune`, `upcycle` and `soup`: models from models."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from softmoe import recipes
from softmoe.cli.parse import parse, parse_run, parse_size
from softmoe.cli.train import drive, take, take_told
from softmoe.evaluate.api import OnDevice
from softmoe.transfer import Upcycle

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

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
        raise ValueError("give a model and data: softmoe finetune MODEL DATA")
    return drive(*parse_finetune(argv[0], argv[1], argv[2:]))


def parse_finetune(model: str, data: str, argv: list[str]) -> tuple[TrainConfig, bool]:
    from softmoe.transfer import transfer_config

    size, rest = take(argv, "--image-size")
    model, rest = take_told(model, rest)
    adapters, rest = "--adapters" in rest, [word for word in rest if word != "--adapters"]
    image_size = parse_size(size) if size else None
    default = transfer_config(recipes.load("finetune"), model, image_size=image_size, adapters=adapters)
    default = replace(default, data=replace(default.data, train=data))
    return parse_run(default, rest, "softmoe finetune MODEL DATA")


def upcycle_command(argv: list[str]) -> int:
    a = parse(Upcycle, argv, "upcycle")
    check_empty(a.out)
    print(a.run(lambda line: print(line, file=sys.stderr, flush=True)))
    if a.out is not None and a.init != "compare":
        print(f"saved in {a.out}")
    return 0


@dataclass(frozen=True)
class SoupArguments(OnDevice):
    """Average the weights of models that were fine-tuned from the same one: one model, better than each, at no cost."""

    models: tuple[str, ...]
    """Folders of saved models or of runs."""
    _: KW_ONLY
    out: str
    """Folder of the new model; it must be new or empty."""
    greedy: bool = False
    """Best first, and keep only those that do not lower the accuracy on --data."""
    data: str | None = None
    """Greedy: images to choose by (not those the result is later judged by): a folder, or a source as in training."""
    split: str = "val"
    examples: int | None = None
    """Greedy: use this many images only, drawn at random."""
    batch_size: int = 64


def check_empty(out: str | None) -> None:
    """Raise ValueError for a folder of the user's that a new model would take the place of."""
    if out is not None and Path(out).exists() and any(Path(out).iterdir()):
        raise ValueError(f"{out} is there already: choose another --out, or remove it")


def soup_command(argv: list[str]) -> int:
    a = parse(SoupArguments, argv, "soup")
    if a.greedy != (a.data is not None):
        raise ValueError("--greedy and --data belong together: a greedy soup is chosen by its accuracy on data")
    check_empty(a.out)

    from softmoe.machine import choose_device
    from softmoe.transfer import greedy_soup, soup

    if not a.greedy:
        print(f"averaged {len(soup(a.models, a.out).kept)} models into {a.out}")
        return 0
    device = choose_device(a.device)
    result = greedy_soup(a.models, a.out, accuracy_on(a, device), device)
    for index in sorted(range(len(a.models)), key=lambda index: -result.scores[index]):
        print(f"{result.scores[index]:.4f}  {'kept' if index in result.kept else 'left'}  {a.models[index]}")
    print(f"{result.score:.4f}  soup of {len(result.kept)}, in {a.out}")
    return 0


def accuracy_on(a: SoupArguments, device: torch.device) -> Callable[[nn.Module], float]:
    """Return a function that measures top-1 on the data, prepared as the first model says."""
    import torch

    from softmoe.data import evaluation_batches, open_source
    from softmoe.evaluate.classify import classification
    from softmoe.evaluate.inputs import evaluation_transform, match_classes, random_subset
    from softmoe.machine import choose_precision
    from softmoe.storage import open_saved

    assert a.data is not None
    dtype = choose_precision(a.precision, device, lambda line: print(line, file=sys.stderr))
    first = open_saved(a.models[0])
    source = random_subset(open_source(a.data, a.split), a.examples)
    source, _ = match_classes(source, first.classes, first.config.num_classes or 0)
    transform = evaluation_transform(first.preprocessing)

    def score(model: nn.Module) -> float:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            return classification(model, evaluation_batches(source, transform, a.batch_size))["top1"]

    return score
