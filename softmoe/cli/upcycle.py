"""`softmoe upcycle DENSE --experts 128`: experts from a dense model's MLPs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass(frozen=True)
class Arguments:
    """Make a model with experts from a dense one, save it, and say how far its output is from the dense one's."""

    dense: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DENSE")]
    """A saved model or run; or an .npz or .safetensors file in the naming of the original ViT, big_vision or timm."""
    experts: int = 16
    slots: int = 1
    """Slots per expert."""
    blocks: str = "last_half"
    """last_half, or block numbers as in 6,7,8."""
    router: str = "soft"
    init: str = "beside"
    """beside keeps the MLPs and adds narrow experts whose output begins at zero: nothing is lost. The others put copies
    of the MLPs in their place, with routers that are fresh (copy) or set from the tokens of --data (centers, positions,
    or closest: the better of these, refined). compare tries all, saves none and recommends one."""
    expert_dim: int | None = None
    """Hidden width of each expert; None is a sixteenth of the MLP's beside it, and all of it in its place."""
    redraw: float = 0.0
    """Copies: share of each expert's hidden units that are drawn anew."""
    noise: float = 0.0
    """Copies: added to each expert, relative to the deviation of its weights."""
    capacity_factor: float | None = None
    """Sparse routers: room for tokens."""
    data: str | None = None
    """Images for the routers and the report: a folder, or a source as in training."""
    split: str = "train"
    images: int = 128
    """Images of --data: so many for the routers, and as many others for the report."""
    out: str | None = None
    """Folder of the new model; None only reports."""
    heads: int | None = None
    """Heads of timm's weights, which do not tell."""
    image_size: int | None = None
    """Image size of others' weights whose positions do not tell."""
    activation: str | None = None
    """Activation of timm's weights: gelu, or gelu_tanh for models that use it."""
    mean: tuple[float, float, float] | None = None
    """Mean of the pixels in [0, 1] that timm's model was trained with; None is 0.5."""
    std: tuple[float, float, float] | None = None
    seed: int = 0


def main(argv: list[str]) -> int:
    a = tyro.cli(Arguments, args=argv, prog="softmoe upcycle")
    blocks = parse_blocks(a.blocks)

    import torch

    from softmoe.convert.files import read_model
    from softmoe.storage import save_pretrained
    from softmoe.transfer import compare_starts, upcycle

    torch.manual_seed(a.seed)
    foreign = {name: getattr(a, name) for name in ("heads", "image_size", "activation", "mean", "std")}
    dense = read_model(a.dense, **{name: value for name, value in foreign.items() if value is not None})
    facts = saved_facts(a.dense)
    images = held_out = None
    if a.data is not None:
        both = read_images(a, facts.get("preprocessing"), dense.config.image_shape)
        images, held_out = both[::2], both[1::2]
    optional = {"capacity_factor": a.capacity_factor, "expert_dim": a.expert_dim}
    options: dict[str, Any] = {
        **{name: value for name, value in optional.items() if value is not None},
        "blocks": blocks,
        "router": a.router,
        "images": images,
        "held_out": held_out,
        "report": lambda line: print(line, file=sys.stderr, flush=True),
    }
    if a.init == "compare":
        print(compare_starts(dense, a.experts, a.slots, **options))
        return 0
    start = upcycle(dense, a.experts, a.slots, init=a.init, noise=a.noise, redraw=a.redraw, **options)
    print(start)
    if a.out is not None:
        made = {"upcycled_from": a.dense, "init": a.init, "distance": start.distance.features}
        save_pretrained(start.model, a.out, provenance=made, **facts)
        print(f"saved in {a.out}")
    return 0


def parse_blocks(text: str) -> str | tuple[int, ...]:
    if text == "last_half":
        return text
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--blocks must be last_half or block numbers as in 6,7,8, got {text!r}")
    return tuple(int(part) for part in parts)


def saved_facts(dense: str) -> dict[str, Any]:
    """Preprocessing and classes of one of our own models; others' files tell neither."""
    from softmoe.storage import open_saved

    if Path(dense).is_file():
        return {}
    saved = open_saved(dense)
    return {"preprocessing": saved.preprocessing, "classes": saved.classes}


def read_images(a: Arguments, preprocessing: Any, size: tuple[int, int]) -> Any:
    from softmoe.data import evaluation_batches, open_source
    from softmoe.evaluate.inputs import evaluation_transform, random_subset
    from softmoe.storage import Preprocessing

    assert a.data is not None
    source = random_subset(open_source(a.data, a.split), 2 * a.images, a.seed)
    transform = evaluation_transform(preprocessing or Preprocessing(size))
    return next(iter(evaluation_batches(source, transform, len(source)))).images
