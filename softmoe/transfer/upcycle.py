"""A Soft (or sparse) MoE from a dense vision transformer: experts are copies of its MLPs.

    start = upcycle(dense, num_experts=128, init="closest", images=images)
    start.model, print(start.distance)

Letters: B images, M tokens, D width, H hidden width, N experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.models import MoEConfig, VisionTransformer
from softmoe.models.transformer import MLP, Block
from softmoe.moe import Experts, MoE
from softmoe.moe.record import evaluating
from softmoe.transfer.upcycle_routers import WAYS, can_start_near, refine, start_near

INITS = ("copy", *WAYS, "closest")
NOISE_IMAGES = 8
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


@dataclass(frozen=True)
class Upcycled:
    model: VisionTransformer
    distance: Distance
    """From the dense model, at once."""


@torch.no_grad()
def upcycle(
    dense: VisionTransformer,
    num_experts: int,
    slots_per_expert: int = 1,
    *,
    blocks: str | Sequence[int] = "last_half",
    router: str = "soft",
    init: str = "copy",
    noise: float = 0.0,
    images: Tensor | None = None,
    held_out: Tensor | None = None,
    **options: Any,
) -> Upcycled:
    """Replace the MLPs of `blocks` ("last_half", or indices) by MoE layers whose experts are copies of them.

    `init` says how the routers start: "copy" leaves them fresh; "centers" and "positions" set them from the tokens of
    `images` (B, 3, height, width) so that each token comes back from a slot with tokens like it, or with its
    neighbors; "closest" takes for each layer the better of the two and refines it by gradient descent. `noise` is the
    deviation of what is added to each expert, relative to that of the weights. `options` are those of the
    router and of MoEConfig. The distance is measured on `held_out` images if given, else on `images`, else on noise.
    """
    config = dense.config
    if config.moe is not None:
        raise ValueError("only a dense model can be upcycled, and this one has experts already")
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}")
    if noise < 0:
        raise ValueError(f"noise must not be negative, got {noise}")
    options["blocks"] = None if blocks == "last_half" else parse_blocks(blocks)
    if slots_per_expert != 1:  # not every router has slots
        options["slots_per_expert"] = slots_per_expert
    moe = MoEConfig.of(router, num_experts, **options)
    model = copy_model(dense, replace(config, moe=moe))
    if init != "copy":
        if images is None:
            raise ValueError(f"init={init!r} looks at the tokens of real images: give images=, or use init='copy'")
        with evaluating(dense, model):
            fit_routers(dense, model, images, init)
    if noise:
        add_noise(model, noise)
    seen = images if held_out is None else held_out
    return Upcycled(
        model, distance(dense, model, random_images(model) if seen is None else seen, real=seen is not None)
    )


def parse_blocks(blocks: str | Sequence[int]) -> tuple[int, ...]:
    if isinstance(blocks, str):
        raise ValueError(f"blocks must be 'last_half' or indices, got {blocks!r}")
    return tuple(blocks)


def copy_model(dense: VisionTransformer, config: Any) -> VisionTransformer:
    """Everything of `dense`, its MLPs N times where `config` has experts."""
    first = next(dense.parameters())
    model = VisionTransformer(config).to(dtype=first.dtype, device=first.device)
    old = dense.state_dict()
    kept = {name: old[name] for name in model.state_dict() if name in old}
    model.load_state_dict(kept, strict=False)
    for index in config.moe_blocks:
        layer, mlp = layers(model, index), layers(dense, index)
        assert isinstance(layer, MoE)
        assert isinstance(layer.experts, Experts)
        assert isinstance(mlp, MLP)
        e = layer.experts
        for stacked, value in (
            (e.w1, mlp.fc1.weight.T),
            (e.b1, mlp.fc1.bias),
            (e.w2, mlp.fc2.weight),
            (e.b2, mlp.fc2.bias),
        ):
            stacked.copy_(value.expand_as(stacked))
    return model.train(dense.training)


def layers(model: VisionTransformer, index: int) -> MoE | MLP:
    block = model.encoder.blocks[index]
    assert isinstance(block, Block)
    assert isinstance(block.mlp, MoE | MLP)
    return block.mlp


def fit_routers(dense: VisionTransformer, model: VisionTransformer, images: Tensor, init: str) -> None:
    """Layer after layer, each on the tokens that reach it through the layers already set."""
    x_BMD = encoder_input(model, images)
    for index, block in enumerate(model.encoder.blocks):
        assert isinstance(block, Block)
        x_BMD = x_BMD + block.attention(block.norm1(x_BMD))
        normed_BMD = block.norm2(x_BMD)
        if isinstance(block.mlp, MoE) and can_start_near(block.mlp.router):
            mlp = layers(dense, index)
            start_near(block.mlp, mlp, normed_BMD, tuple(WAYS) if init == "closest" else (init,))
            if init == "closest":
                refine(block.mlp, mlp, normed_BMD)
        x_BMD = x_BMD + block.mlp(normed_BMD)


def encoder_input(model: VisionTransformer, images: Tensor) -> Tensor:
    """(B, M, D): patches with their positions."""
    caught: list[Tensor] = []
    hook = model.encoder.register_forward_pre_hook(lambda module, given: caught.append(given[0]))
    try:
        model.forward_features(images)
    finally:
        hook.remove()
    return caught[0]


def add_noise(model: VisionTransformer, noise: float) -> None:
    for index in model.config.moe_blocks:
        for parameter in layers(model, index).experts.parameters():  # pyright: ignore
            deviation = parameter[0].std(correction=0)
            parameter.add_(torch.randn_like(parameter) * (noise * deviation))


def random_images(model: VisionTransformer) -> Tensor:
    first = next(model.parameters())
    shape = (NOISE_IMAGES, 3, *model.config.image_shape)
    return torch.rand(shape, dtype=first.dtype, device=first.device) * 2 - 1


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
