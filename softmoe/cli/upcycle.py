"""`softmoe upcycle DENSE --experts 128`: experts from a dense model's MLPs."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from softmoe.cli.parse import read_words


@dataclass(frozen=True)
class Arguments:
    """Make a model with experts from a dense one, save it, and say how far its output is from the dense one's."""

    dense: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DENSE")]
    """A saved model or run; or others' weights: an .npz or .safetensors file (original ViT, big_vision, timm, Hugging
    Face, open_clip, torchvision), or a folder or Hub id with its config.json."""
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
    """Heads of a file of others' weights, if they cannot be told from its width."""
    image_size: int | None = None
    """Image size of others' weights whose positions do not tell."""
    activation: str | None = None
    """Activation of a file of others' weights: gelu, gelu_tanh (SigLIP) or quick_gelu (OpenAI's CLIP)."""
    mean: str | None = None
    """Mean of the pixels in [0, 1] that a file of others' weights was trained with: 0.5, or 0.485,0.456,0.406."""
    std: str | None = None
    """Their deviation, as 0.5 or 0.229,0.224,0.225."""
    seed: int = 0


def main(argv: list[str]) -> int:
    a = read_words(Arguments, args=argv, prog="softmoe upcycle")
    blocks = parse_blocks(a.blocks)

    import torch

    from softmoe.convert.foreign import open_foreign, with_options
    from softmoe.storage import from_pretrained, open_saved, save_pretrained
    from softmoe.transfer import compare_starts, upcycle

    torch.manual_seed(a.seed)
    given = {name: getattr(a, name) for name in ("heads", "image_size", "activation", "mean", "std")}
    foreign = open_foreign(with_options(a.dense, given))
    dense = from_pretrained(a.dense) if foreign is None else foreign.model
    saved = open_saved(a.dense) if foreign is None else foreign
    facts = {"preprocessing": saved.preprocessing, "classes": saved.classes}
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


def read_images(a: Arguments, preprocessing: Any, size: tuple[int, int]) -> Any:
    from softmoe.data import evaluation_batches, open_source
    from softmoe.evaluate.inputs import evaluation_transform, random_subset
    from softmoe.storage import Preprocessing

    assert a.data is not None
    source = random_subset(open_source(a.data, a.split), 2 * a.images, a.seed)
    transform = evaluation_transform(preprocessing or Preprocessing(size))
    return next(iter(evaluation_batches(source, transform, len(source)))).images
