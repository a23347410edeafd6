"""`softmoe soup MODELS... --out FOLDER`: the mean of the weights of several models."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from softmoe.cli.parse import parse


@dataclass(frozen=True)
class Arguments:
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
    device: str = "auto"


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "soup")
    if a.greedy != (a.data is not None):
        raise ValueError("--greedy and --data belong together: a greedy soup is chosen by its accuracy on data")

    if Path(a.out).exists() and any(Path(a.out).iterdir()):
        raise ValueError(f"{a.out} is there already: choose another --out, or remove it")

    from softmoe.machine import choose_device
    from softmoe.transfer import greedy_soup, soup

    if not a.greedy:
        print(f"averaged {len(soup(a.models, a.out).kept)} models into {a.out}")
        return 0
    result = greedy_soup(a.models, a.out, accuracy(a), choose_device(a.device))
    for index in sorted(range(len(a.models)), key=lambda index: -result.scores[index]):
        print(f"{result.scores[index]:.4f}  {'kept' if index in result.kept else 'left'}  {a.models[index]}")
    print(f"{result.score:.4f}  soup of {len(result.kept)}, in {a.out}")
    return 0


def accuracy(a: Arguments):
    """Top-1 on the data, prepared as the first model says."""
    from softmoe.data import evaluation_batches, open_source
    from softmoe.evaluate.classify import classification
    from softmoe.evaluate.inputs import evaluation_transform, match_classes, random_subset
    from softmoe.storage import open_saved

    assert a.data is not None
    first = open_saved(a.models[0])
    source = random_subset(open_source(a.data, a.split), a.examples)
    source, _ = match_classes(source, first.classes, first.config.num_classes or 0)
    transform = evaluation_transform(first.preprocessing)
    return lambda model: classification(model, evaluation_batches(source, transform, a.batch_size))["top1"]
