"""How far one model's output is from another's, and which layers did it.

Letters: B images, M tokens, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softmoe.models import VisionTransformer
from softmoe.models.modes import evaluating

SPARSE = ("tokens_choice", "experts_choice")
NEARLY_THE_MEAN = 0.3  # layers of slots that tell tokens apart are nearer than this


@dataclass(frozen=True)
class Distance:
    """Means over the images of |theirs - dense| / |dense|. An output equal to zero would be at distance 1."""

    features: float
    """Of the vector before the head."""
    logits: float | None
    same_class: float | None
    """Share of images whose largest logit is the same."""
    layers: dict[int, float]
    """Block -> distance of the MoE's output from the MLP's, for the same tokens (those of the dense model)."""
    router: str
    images: int
    real: bool
    """Whether the images were given; otherwise they are noise, on which models behave otherwise."""

    def __str__(self) -> str:
        kind = "images" if self.real else "images of random noise (give real ones for a true figure)"
        lines = [f"distance from the dense model, on {self.images} {kind}:", f"  features {self.features:9.4f}"]
        if self.logits is not None and self.same_class is not None:
            lines += [f"  logits   {self.logits:9.4f}", f"  same class {100 * self.same_class:5.1f} %"]
        lines += [f"  MoE in block {index} against its MLP {value:9.4f}" for index, value in self.layers.items()]
        return "\n".join([*lines, f"why: {self.why()}"])

    def why(self) -> str:
        worst = max(self.layers.values(), default=0.0)
        if worst < 1e-5:
            return "every token comes back from an expert that saw that token alone, and all experts are the old MLP"
        if self.router in SPARSE:
            return "a token gets the MLP's output times a gate below 1, and nothing where it found no place"
        mixed = "slots hold mixtures of tokens, so a token gets what the MLP gives for a mixture, not for itself"
        if worst > NEARLY_THE_MEAN:
            mixed += "; with a fresh router the mixture is nearly the mean of the image, the same for all its tokens"
        return mixed


@torch.no_grad()
def distance(dense: VisionTransformer, other: VisionTransformer, images: Tensor, *, real: bool = True) -> Distance:
    """Compare `other` (upcycled from `dense`) with it, in evaluation mode."""
    layers = dict.fromkeys(other.config.moe_blocks, 0.0)
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = [
        dense.encoder.blocks[index].mlp.register_forward_hook(keep(seen, index))  # pyright: ignore
        for index in layers
    ]
    try:
        with evaluating(dense, other):
            ours, theirs = (model.forward_features(images) for model in (dense, other))
            for index, (given, output) in seen.items():
                layers[index] = relative(other.encoder.blocks[index].mlp(given), output)  # pyright: ignore
    finally:
        for hook in hooks:
            hook.remove()
    features = [m.forward_head(x, pre_logits=True) for m, x in ((dense, ours), (other, theirs))]
    logits = [m.forward_head(x) for m, x in ((dense, ours), (other, theirs))]
    headless = isinstance(dense.head, nn.Identity)
    return Distance(
        features=relative(features[1], features[0]),
        logits=None if headless else relative(logits[1], logits[0]),
        same_class=None if headless else float((logits[0].argmax(-1) == logits[1].argmax(-1)).double().mean()),
        layers=layers,
        router="none" if other.config.moe is None else other.config.moe.router.name,
        images=len(images),
        real=real,
    )


def keep(seen: dict[int, tuple[Tensor, Tensor]], index: int):
    def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        seen[index] = (given[0], output)

    return hook


def relative(a: Tensor, b: Tensor) -> float:
    """Mean over the images of |a - b| / |b|; 0 / 0 is 0."""
    difference, length = (t.flatten(1).double().norm(dim=1) for t in (a - b, b))
    return float((difference / length.clamp(min=torch.finfo(torch.float64).tiny)).mean())
