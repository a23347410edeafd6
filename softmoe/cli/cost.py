"""`softmoe cost`: parameters and FLOPs of models, before anything runs."""

import json
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from softmoe.cli.parse import parse, parse_size


@dataclass(frozen=True)
class Arguments:
    """Parameters, multiply-accumulates and FLOPs per image, in total and by part."""

    names: tuple[str, ...] = ()
    """Models, like vit_s16, soft_s16_128e or experts_choice_b16_32e; or folders of saved models and runs."""
    _: KW_ONLY
    classes: int = 1000
    """Outputs of the head; 0 is a model without a head. A saved model has its own."""
    image_size: str = "224"
    """Pixels, or HEIGHTxWIDTH. A saved model has its own."""
    convention: Literal["ours", "paper"] = "ours"
    """Sparse routers: our dispatch by index, or the one-hot products that the paper's tables count."""
    json: bool = False
    """Print exact numbers as JSON."""
    paper: bool = False
    """Print the cost columns of the paper's tables beside ours, and where they differ."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "cost")
    if not arguments.names and not arguments.paper:
        raise ValueError("give the names of models (like soft_s16_128e), or --paper")
    if arguments.paper and arguments != Arguments(paper=True, json=arguments.json):
        raise ValueError("--paper shows the paper's own models and takes no name and no option but --json")
    image_size = parse_size(arguments.image_size)  # a typo shall not wait for torch

    from softmoe.budget import report
    from softmoe.budget.count import cost
    from softmoe.models import model_config
    from softmoe.storage import open_saved

    if arguments.paper:
        print(json.dumps(report.paper_values(), indent=2) if arguments.json else report.paper_report())
        return 0
    classes = arguments.classes or None
    models = {
        name: open_saved(name).config
        if Path(name).is_dir() or "/" in name
        else model_config(name, num_classes=classes, image_size=image_size)
        for name in arguments.names
    }
    if arguments.json:
        values = {name: cost(c, convention=arguments.convention).to_dict() for name, c in models.items()}
        print(json.dumps(values, indent=2))
    else:
        print(report.models_report(models, arguments.convention))
    return 0
