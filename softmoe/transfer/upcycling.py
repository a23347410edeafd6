"""Give experts to a trained dense vision transformer: beside its MLPs, or copies of them in their place.

    start = upcycle(dense, num_experts=16, images=images)
    start.model, print(start)

Letters: B images, M tokens, D width, H hidden width, N experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.budget import cost
from softmoe.convert.foreign import open_foreign, with_options
from softmoe.data import evaluation_batches, open_source
from softmoe.evaluate.inputs import evaluation_transform, random_subset
from softmoe.machine import choose_device
from softmoe.models import MoEConfig, VisionTransformer
from softmoe.models.transformer import MLP
from softmoe.moe import Experts, ExpertsBeside, MoE
from softmoe.moe.record import evaluating
from softmoe.storage import Preprocessing, load_saved, open_saved, save_pretrained
from softmoe.storage.adapters import dense_name
from softmoe.transfer import Upcycle, UpcycleOptions
from softmoe.transfer.upcycling_routers import WAYS, fit_routers, mlp_of

INITS = ("beside", "copy", *WAYS, "closest")
NARROW = 16  # experts beside an MLP have this part of its hidden width
NOISE_IMAGES = 8
SPARSE = ("tokens_choice", "experts_choice")
NEARLY_THE_MEAN = 0.3  # layers of slots that tell tokens apart are nearer than this


@dataclass(frozen=True)
class Distance:
    """Holds means over the images of |theirs - dense| / |dense|. An output equal to zero would be at distance 1."""

    features: float
    """Of the vector before the head."""
    logits: float | None
    same_class: float | None
    """Share of images whose largest logit is the same."""
    layers: dict[int, float]
    """Block -> distance of the MoE's output from the MLP's, for the same tokens (those of the dense model)."""
    router: str
    kept: bool
    """Whether the MLPs are kept, with experts beside them."""
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
        if self.kept and worst == 0.0:
            return "the MLPs are kept, and the experts beside them begin with an output of zero"
        if worst < 1e-5:
            return "every token comes back from an expert that saw that token alone, and all experts are the old MLP"
        if self.router in SPARSE:
            return "a token gets the MLP's output times a gate below 1, and nothing where it found no place"
        mixed = "slots hold mixtures of tokens, so a token gets what the MLP gives for a mixture, not for itself"
        if worst > NEARLY_THE_MEAN:
            mixed += "; here the mixture is nearly the mean of the image, the same for all its tokens"
        return mixed


@dataclass(frozen=True)
class Upcycled:
    model: VisionTransformer
    distance: Distance
    """From the dense model, at once."""
    init: str
    flops: float
    """FLOPs of the forward pass, over those of the dense model."""
    params: float
    """Parameters, over those of the dense model."""

    def __str__(self) -> str:
        c = self.model.config
        assert c.moe is not None
        width, where = c.moe.hidden_dim(c.mlp_dim), "beside" if c.moe.keep_mlp else "in place of"
        blocks = ", ".join(map(str, c.moe_blocks))
        return (
            f"start {self.init}: {c.moe.num_experts} experts of hidden width {width} {where} the MLPs of blocks "
            f"{blocks}\n"
            f"cost: {self.flops:.2f} times the dense model's FLOPs forward, {self.params:.2f} times its parameters\n"
            f"{self.distance}"
        )


@torch.no_grad()
def upcycle(
    dense: VisionTransformer,
    num_experts: int = 16,
    slots_per_expert: int = 1,
    *,
    images: Tensor | None = None,
    held_out: Tensor | None = None,
    report: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Upcycled:
    """Give the MLPs of a dense model experts; the dense model stays as it is.

    `options` are the fields of `UpcycleOptions` (blocks, router, init, expert_dim, redraw, noise), and those of the
    router and of MoEConfig. With init "beside" the new model is at first exactly the old one. "centers" and
    "positions" set the routers from the tokens of `images` (B, 3, height, width) so that each token comes back from a
    slot with tokens like it, or with its neighbors; "closest" takes for each layer the better of the two and refines
    it by gradient descent. Beside an MLP, routers take the better of the two if there are images. The distance is
    measured on `held_out` images if given, else on `images`, else on noise. `report` is told of the progress.
    """
    config = dense.config
    own = {f.name for f in fields(UpcycleOptions)}
    asked = UpcycleOptions(
        experts=num_experts, slots=slots_per_expert, **{name: options.pop(name) for name in own & options.keys()}
    )
    init, noise, redraw = asked.init, asked.noise, asked.redraw
    for name in ("expert_dim", "capacity_factor"):
        if getattr(asked, name) is not None:
            options[name] = getattr(asked, name)
    if config.moe is not None:
        raise ValueError("only a dense model can be upcycled, and this one has experts already")
    if options.get("slots_stay"):
        raise ValueError("with slots_stay no token gets back what its MLP gave: such a model is trained from the start")
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}")
    if noise < 0:
        raise ValueError(f"noise must not be negative, got {noise}")
    if not 0.0 <= redraw <= 1.0:
        raise ValueError(f"redraw is a share in [0, 1], got {redraw}")
    if init == "beside":
        if noise or redraw:
            raise ValueError("noise and redraw change copies of the MLPs: give another init, such as 'closest'")
        options = {"expert_dim": max(1, config.mlp_dim // NARROW)} | options | {"keep_mlp": True}
    elif options.get("expert_dim") or options.get("keep_mlp"):
        raise ValueError(
            f"experts of init={init!r} are copies of the MLPs in their place: leave out expert_dim and keep_mlp"
        )
    options["blocks"] = parse_blocks(asked.blocks)
    if asked.slots != 1:  # not every router has slots
        options["slots_per_expert"] = asked.slots
    moe = MoEConfig.of(asked.router, asked.experts, **options)
    model = copy_model(dense, replace(config, moe=moe))
    if images is None and init not in ("beside", "copy"):
        raise ValueError(
            f"init={init!r} looks at the tokens of real images: give images= (--data), or use init='beside'"
        )
    if images is not None and init != "copy":
        with evaluating(dense, model):
            fit_routers(dense, model, images, init, report)
    if redraw:
        draw_anew(model, redraw)
    if noise:
        add_noise(model, noise)
    seen = images if held_out is None else held_out
    report("measuring the distance from the dense model")
    old, new = cost(config), cost(model.config)
    return Upcycled(
        model,
        distance(dense, model, random_images(model) if seen is None else seen, real=seen is not None),
        init,
        new.forward_flops / old.forward_flops,
        new.params / old.params,
    )


def compare_starts(
    dense: VisionTransformer,
    num_experts: int,
    slots_per_expert: int = 1,
    *,
    expert_dim: int | None = None,
    **given: Any,
) -> str:
    """Try every start that `upcycle` has for what is given, and return a table that ends in a recommendation."""
    starts = []
    for init in INITS if given.get("images") is not None else ("beside", "copy"):
        width = (expert_dim or None) if init == "beside" else None
        fixed: dict[str, Any] = {"init": init, "expert_dim": width, "noise": 0.0, "redraw": 0.0}
        starts.append(upcycle(dense, num_experts, slots_per_expert, **{**given, **fixed}))
    best = min(starts, key=lambda s: (s.distance.features, s.flops))
    lines = ["start       features away  same class  FLOPs of dense  parameters of dense"]
    for s in starts:
        same = "-" if s.distance.same_class is None else f"{100 * s.distance.same_class:.1f} %"
        lines.append(f"{s.init:<10}{s.distance.features:15.4f}{same:>12}{s.flops:16.2f}{s.params:21.2f}")
    count = f"{best.distance.images} images" + ("" if best.distance.real else " of random noise (give real ones)")
    return "\n".join([*lines, f"recommended: {best.init}, the nearest to the dense model on {count}"])


def parse_blocks(blocks: str | Sequence[int]) -> tuple[int, ...] | None:
    """Return block numbers, also of a text as in 6,7,8; None for the last half."""
    if blocks == "last_half":
        return None
    if not isinstance(blocks, str):
        return tuple(blocks)
    parts = blocks.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"blocks must be 'last_half' or indices, got {blocks!r}: "
            "--blocks must be last_half or block numbers as in 6,7,8"
        )
    return tuple(int(part) for part in parts)


def run_upcycle(a: Upcycle, report: Callable[[str], None]) -> Upcycled | str:
    """Read the dense model and the images, give it experts, and save it if asked to."""
    torch.manual_seed(a.seed)
    foreign = open_foreign(with_options(a.dense, a.foreign_options | {"image_size": a.image_size}))
    saved = foreign or open_saved(a.dense)
    device = choose_device(a.device)
    dense = (load_saved(saved) if foreign is None else foreign.model).to(device)
    options: dict[str, Any] = {f.name: getattr(a, f.name) for f in fields(UpcycleOptions)}
    counts = options.pop("experts"), options.pop("slots")
    if a.data is not None:
        source = random_subset(open_source(a.data, a.split), 2 * a.images, a.seed)
        transform = evaluation_transform(saved.preprocessing or Preprocessing(dense.config.image_shape))
        both = next(iter(evaluation_batches(source, transform, len(source)))).images.to(device)
        options |= {"images": both[::2], "held_out": both[1::2]}
    if a.init == "compare":
        return compare_starts(dense, *counts, report=report, **options)
    start = upcycle(dense, *counts, report=report, **options)
    if a.out is not None:
        made = {"upcycled_from": a.dense, "init": a.init, "distance": start.distance.features}
        save_pretrained(start.model, a.out, provenance=made, preprocessing=saved.preprocessing, classes=saved.classes)
    return start


def copy_model(dense: VisionTransformer, config: Any) -> VisionTransformer:
    """Copy all of `dense`, its MLPs N times where `config` has experts in their place."""
    first = next(dense.parameters())
    model = VisionTransformer(config).to(dtype=first.dtype, device=first.device)
    old = dense.state_dict()
    names = {name: dense_name(name) for name in model.state_dict()}
    model.load_state_dict({name: old[theirs] for name, theirs in names.items() if theirs in old}, strict=False)
    for index in config.moe_blocks:
        layer, mlp = mlp_of(model, index), mlp_of(dense, index)
        if isinstance(layer, ExpertsBeside):
            continue
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


def add_noise(model: VisionTransformer, noise: float) -> None:
    for index in model.config.moe_blocks:
        for parameter in mlp_of(model, index).experts.parameters():  # pyright: ignore
            deviation = parameter[0].std(correction=0)
            parameter.add_(torch.randn_like(parameter) * (noise * deviation))


def draw_anew(model: VisionTransformer, share: float) -> None:
    """Draw this share of each expert's hidden units anew, others for each expert, as large as the old ones."""
    for index in model.config.moe_blocks:
        experts = mlp_of(model, index).experts
        assert isinstance(experts, Experts)
        drawn_NH = torch.rand_like(experts.b1).argsort(1) < round(share * experts.hidden_dim)
        for weight_NDH in (experts.w1, experts.w2):
            fresh_NDH = torch.randn_like(weight_NDH) * weight_NDH[0].std(correction=0)
            weight_NDH.copy_(torch.where(drawn_NH[:, None], fresh_NDH, weight_NDH))
        experts.b1.masked_fill_(drawn_NH, 0.0)


def random_images(model: VisionTransformer) -> Tensor:
    first = next(model.parameters())
    shape = (NOISE_IMAGES, 3, *model.config.image_shape)
    return torch.rand(shape, dtype=first.dtype, device=first.device) * 2 - 1


@torch.no_grad()
def distance(dense: VisionTransformer, other: VisionTransformer, images: Tensor, *, real: bool = True) -> Distance:
    """Compare `other` (upcycled from `dense`) with it, in evaluation mode."""
    layers, grid = dict.fromkeys(other.config.moe_blocks, 0.0), dense.embed.grid(images.shape[2], images.shape[3])
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = [
        dense.encoder.blocks[index].mlp.register_forward_hook(keep(seen, index))  # pyright: ignore
        for index in layers
    ]
    try:
        with evaluating(dense, other):
            features = [model.forward_vector(images) for model in (dense, other)]
            for index, (given, output) in seen.items():
                layers[index] = relative(other.encoder.blocks[index].mlp(given, None, grid), output)  # pyright: ignore
    finally:
        for hook in hooks:
            hook.remove()
    logits = [model.head(vector) for model, vector in zip((dense, other), features, strict=True)]
    headless = isinstance(dense.head, nn.Identity)
    return Distance(
        features=relative(features[1], features[0]),
        logits=None if headless else relative(logits[1], logits[0]),
        same_class=None if headless else float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean()),
        layers=layers,
        router="none" if other.config.moe is None else other.config.moe.router.name,
        kept=other.config.moe is not None and other.config.moe.keep_mlp,
        images=len(images),
        real=real,
    )


def keep(seen: dict[int, tuple[Tensor, Tensor]], index: int):
    def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        seen[index] = (given[0], output)

    return hook


def relative(a: Tensor, b: Tensor) -> float:
    """Return the mean over the images of |a - b| / |b|; 0 / 0 is 0."""
    difference, length = (t.flatten(1).cpu().double().norm(dim=1) for t in (a - b, b))  # mps has no float64
    return float((difference / length.clamp(min=torch.finfo(torch.float64).tiny)).mean())
