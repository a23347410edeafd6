"""Put experts into the MLPs of any model, in place: timm's, Hugging Face's, open_clip's, torchvision's, your own.

    report = upcycle_(model, mlps="blocks.*.mlp", experts=16, batches=images)
    print(report)                                   which modules, how far the output moved, the cost
    upcycle_(fresh, **report.config)                the same structure again, without data: then load_state_dict

Attention, norms, positions and everything else stay as they are; only the modules that match are exchanged.

Letters: B images, M tokens, D width, H hidden width, N experts.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.models import MoEConfig
from softmoe.moe import ExpertsBeside, MoE
from softmoe.moe.record import evaluating
from softmoe.transfer.mlps import TwoModuleMLP, hidden_width, linears, read_mlp
from softmoe.transfer.upcycling import INITS, NARROW, relative
from softmoe.transfer.upcycling_routers import init_router

MAX_BATCHES = 8  # batches that are used, however many are given
OUTPUTS = ("logits", "image_embeds", "pooler_output", "last_hidden_state")  # the first that there is is compared


@dataclass(frozen=True)
class InPlace:
    """The report of `upcycle_`: the changed model and what was done to it."""

    model: nn.Module
    config: dict[str, Any]
    """Arguments of `upcycle_` that make the same structure in a fresh model; they can be written as JSON."""
    modules: tuple[str, ...]
    images: int
    """The number of images that the numbers below were measured on."""
    moved: float | None
    """Mean over the images of |output - output before| / |output before|; None without batches."""
    same_class: float | None
    """Share of images whose largest output is the same, where the output is a vector."""
    macs: float | None
    """Multiply-accumulates of the exchanged modules, over those of before."""
    params: float
    """Parameters of the whole model, over those of before."""

    def __str__(self) -> str:
        c = self.config
        where = "beside" if c["init"] == "beside" else "in place of"
        shown = ", ".join(self.modules[:3]) + (f", ... {self.modules[-1]}" if len(self.modules) > 3 else "")
        lines = [
            f"{c['experts']} experts with {c['slots']} slot{'s' * (c['slots'] > 1)} each {where} {len(self.modules)} "
            f"modules: {shown}",
            f"parameters: {self.params:.3f} times as many in the whole model",
        ]
        if self.macs is not None:
            lines += [f"cost: {self.macs:.2f} times the multiply-accumulates of these modules"]
        if self.moved is None:
            return "\n".join([*lines, "the output was not compared: give batches="])
        same = "" if self.same_class is None else f", the same largest output for {100 * self.same_class:.1f} %"
        return "\n".join([*lines, f"output moved by {self.moved:.4f} of its length on {self.images} images{same}"])


@torch.no_grad()
def upcycle_(
    model: nn.Module,
    mlps: str | Sequence[str] = "blocks.*.mlp",
    experts: int = 16,
    slots: int = 1,
    *,
    init: str = "beside",
    batches: Iterable[Any] | Tensor | None = None,
    blocks: str | Sequence[int] = "all",
    expert_dim: int | None = None,
    router: str = "soft",
    tokens_first: bool | None = None,
    **options: Any,
) -> InPlace:
    """Give the MLPs that match `mlps` experts; the model is changed, and says the same at first with init="beside".

    `mlps` is a name with `*` for any one word, or several; it may leave out what comes before ("layer.*.mlp").
    Hugging Face's ViT of before version 5, whose MLPs lie in two modules, is named by its blocks ("encoder.layer.*").
    `blocks` picks from the matches: "all", "last_half", or indices. `batches` are inputs of the model: a tensor, a
    tuple that begins with one, a mapping of arguments (Hugging Face), or an iterable of such, of which a few are taken;
    routers start from their tokens, and the report compares outputs on them. `init` is that of `softmoe.upcycle`:
    "beside" keeps each module, whatever it is, and adds experts of hidden width `expert_dim` (by default a sixteenth of
    its own); the others put N copies in its place, which must be an MLP of two matrices with GELU, or a gated one.
    `slots` are those of each expert. Inputs of a module may be (B, D), (B, M, D), (B, rows, columns, D), or with
    `tokens_first` (M, B, D), which is found out from batches. `options` are those of the router.
    """
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}")
    if expert_dim and init != "beside":
        raise ValueError(f"experts of init={init!r} are copies of the MLPs: leave out expert_dim")
    single = isinstance(batches, Tensor | Mapping | tuple)
    given = None if batches is None else [batches] if single else list(islice(batches, MAX_BATCHES))
    if given is None and init not in ("beside", "copy"):
        raise ValueError(f"init={init!r} looks at the tokens of real images: give batches=, or use init='beside'")
    names = pick_blocks(find_modules(model, mlps), blocks)
    moe = MoEConfig.of(router, experts, **({"slots_per_expert": slots} if slots != 1 else {}), **options)
    before = sum(parameter.numel() for parameter in model.parameters())
    with evaluating(model):
        old = None if given is None else [model_output(model, batch) for batch in given]
        dense = {name: whole_mlp(model.get_submodule(name), name) for name in names}
        seen = {} if given is None else collect_tokens(model, names, given)
        if tokens_first is None:
            tokens_first = any(first for _, first in seen.values())
        layers: dict[str, MoE] = {}
        macs = [0, 0]
        for name, mlp in dense.items():
            if given is not None and layers and init != "beside":  # through the layers already exchanged
                seen |= collect_tokens(model, [name], given)
            layers[name] = make_layer(mlp, moe, init, expert_dim, name)
            put_layer(model, name, AnyLayout(layers[name], tokens_first))
            if given is not None:
                x_BMD, _ = seen.pop(name)
                init_router(layers[name], mlp, x_BMD, init)
                for index, number in enumerate(macs_of(mlp, layers[name], x_BMD.shape[1], slots * experts)):
                    macs[index] += number
        new = None if given is None else [model_output(model, batch) for batch in given]
    moved, same, images = compare(old, new)
    config = {"mlps": names, "experts": experts, "slots": slots, "init": "beside" if init == "beside" else "copy"}
    config |= {"expert_dim": expert_dim, "router": router, "tokens_first": tokens_first, **options}
    after = sum(parameter.numel() for parameter in model.parameters())
    cost = macs[1] / macs[0] if macs[0] else None
    return InPlace(model, config, tuple(names), images, moved, same, cost, after / before)


class AnyLayout(nn.Module):
    """Gives an MoE layer its tokens as (B, M, D), whatever the layout of the model around it.

    That may be (B, D), (B, M, D), (M, B, D) with `tokens_first`, or (B, rows, columns, D).
    """

    def __init__(self, layer: MoE, tokens_first: bool = False):
        super().__init__()
        self.layer = layer
        self.tokens_first = tokens_first

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        x = first_argument(given, named)
        if x.ndim == 3 and self.tokens_first:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.layer(as_tokens(x)).view(x.shape)


def first_argument(given: tuple[Tensor, ...], named: dict[str, Tensor]) -> Tensor:
    """Return the tokens among the arguments of a module: they come first, by whatever name."""
    return given[0] if given else next(iter(named.values()))


def as_tokens(x: Tensor) -> Tensor:
    """Reshape (B, D), (B, M, D) or (B, rows, columns, D) to (B, M, D)."""
    if x.ndim == 2:
        return x.unsqueeze(1)
    return x if x.ndim == 3 else x.flatten(1, -2)


def find_modules(model: nn.Module, mlps: str | Sequence[str]) -> list[str]:
    """Find the modules whose names match, in the model's order. ValueError that lists close names if there is none."""
    modules = dict(model.named_modules())
    found: set[str] = set()
    for pattern in [mlps] if isinstance(mlps, str) else mlps:
        words = re.escape(pattern).replace(r"\*", r"[^.]+")
        matches = {pattern} if pattern in modules else {n for n in modules if re.fullmatch(rf"(.*\.)?{words}", n)}
        if not matches:
            known = {name: re.sub(r"\b\d+\b", "*", name) for name in modules if name}
            likely = dict.fromkeys(known[name] for name in known if is_mlp(modules[name]))
            near = [*likely, *difflib.get_close_matches(pattern, dict.fromkeys(known.values()), n=3, cutoff=0.5)]
            listed = ", ".join(dict.fromkeys(near[:6]))
            raise ValueError(
                f"mlps={pattern!r} matches no module of this {type(model).__name__}"
                + (f"; close names are {listed}" if listed else "; name the modules in which its MLPs are")
            )
        found |= matches
    names = [name for name in modules if name in found]
    if experts := [name for name in names if any(isinstance(part, MoE) for part in modules[name].modules())]:
        raise ValueError(f"{experts[0]} has experts already")
    return names


def pick_blocks(names: list[str], blocks: str | Sequence[int]) -> list[str]:
    """Keep the matches that the option `blocks` asks for."""
    if blocks == "all":
        return names
    if blocks == "last_half":
        return names[len(names) - len(names) // 2 :] if len(names) > 1 else names
    if isinstance(blocks, str) or any(not 0 <= index < len(names) for index in blocks):
        raise ValueError(f"blocks must be 'all', 'last_half' or indices of the {len(names)} matches, got {blocks!r}")
    return [names[index] for index in sorted(set(blocks))]


def is_mlp(module: nn.Module) -> bool:
    """Tell if a module looks like an MLP: two or three linear layers, from a width and back to it."""
    found = linears(module)
    back = len(found) in (2, 3) and found[0].in_features == found[-1].out_features < found[-1].in_features
    return back or is_split(module)


def is_split(module: nn.Module) -> bool:
    """Tell if this is a block whose MLP lies in two modules, `intermediate` and `output`."""
    halves = (getattr(module, name, None) for name in ("intermediate", "output"))
    return all(isinstance(getattr(half, "dense", None), nn.Linear) for half in halves)


def whole_mlp(module: nn.Module, name: str) -> nn.Module:
    """Return the MLP as one module, whose input and output are tokens."""
    if not is_split(module):
        if not linears(module):
            raise ValueError(f"{name} is a {type(module).__name__} without a linear layer: mlps= must name MLPs")
        return module
    if any(isinstance(part, nn.LayerNorm) for part in module.output.modules()):  # pyright: ignore
        raise ValueError(f"{name} has a norm after its sum (as in BERT), so its MLP cannot be exchanged alone")
    return TwoModuleMLP(module.intermediate, module.output)  # pyright: ignore


def put_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of the MLP called `name`."""
    module = model.get_submodule(name)
    if is_split(module):
        module.intermediate, module.output = layer, AddResidual()
        return
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


class AddResidual(nn.Module):
    """The part of Hugging Face's `output` module that stays: the sum with the residual."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


def make_layer(mlp: nn.Module, moe: MoEConfig, init: str, expert_dim: int | None, name: str) -> MoE:
    """Make the layer that takes an MLP's place, with the MLP inside or with experts that are copies of it."""
    first = linears(mlp)[0]
    with torch.device(first.weight.device):
        if init == "beside":
            width = expert_dim or max(1, hidden_width(mlp) // NARROW)
            fresh = moe.make_layer(first.in_features, width, 0.0, "gelu")
            layer = ExpertsBeside(mlp, fresh.router, fresh.experts)  # pyright: ignore
        else:
            copies = read_mlp(mlp, name).copies(moe.num_experts)
            layer = MoE(moe.router.build(first.in_features), copies)
    return layer.to(first.weight.dtype).train(mlp.training)


def macs_of(mlp: nn.Module, layer: MoE, tokens: int, rows: int) -> tuple[int, int]:
    """Count an image's multiply-accumulates, in the MLP and in the layer, for so many tokens and slots (`rows`)."""
    dense = tokens * sum(linear.weight.numel() for linear in linears(mlp))
    expert = sum(parameter[0].numel() for parameter in layer.experts.parameters() if parameter.ndim == 3)
    kept = dense if isinstance(layer, ExpertsBeside) else 0
    return dense, kept + 3 * tokens * rows * linears(mlp)[0].in_features + rows * expert


def collect_tokens(model: nn.Module, names: Iterable[str], batches: list[Any]) -> dict[str, tuple[Tensor, bool]]:
    """Collect the tokens (B, M, D) that reach each module, and tell if its input has tokens before images.

    Batches of another shape than the first are left out.
    """
    caught: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = []
    for name, kept in caught.items():
        module = model.get_submodule(name)
        target = module.intermediate if is_split(module) else module

        def keep(module: nn.Module, given: Any, named: Any, kept: list[Tensor] = kept) -> None:
            kept.append(first_argument(given, named))

        hooks.append(target.register_forward_pre_hook(keep, with_kwargs=True))  # pyright: ignore
    sizes = []
    try:
        for batch in batches:
            sizes.append(len(model_output(model, batch)))
    finally:
        for hook in hooks:
            hook.remove()
    seen = {}
    for name, kept in caught.items():
        if len(kept) != len(sizes):
            raise ValueError(f"{name} ran {len(kept)} times in {len(sizes)} batches: name modules that run once each")
        first = kept[0].ndim == 3 and kept[0].shape[1] == sizes[0] != kept[0].shape[0]
        tokens = [as_tokens(x.transpose(0, 1) if first else x) for x in kept]
        seen[name] = torch.cat([x for x in tokens if x.shape[1:] == tokens[0].shape[1:]]), first
    return seen


def model_output(model: nn.Module, batch: Any) -> Tensor:
    """Run the model on a batch and return its output (B, ...): of several tensors the logits, or else the first."""
    if isinstance(batch, Mapping):
        found = model(**batch)
    else:
        found = model(batch[0] if isinstance(batch, tuple | list) else batch)
    if isinstance(found, Mapping):
        key = next((key for key in (*OUTPUTS, *found) if isinstance(found.get(key), Tensor)), None)
        found = found.get(key)
    elif isinstance(found, tuple | list):
        found = next((part for part in found if isinstance(part, Tensor)), None)
    if not isinstance(found, Tensor):
        raise ValueError(f"the model's output for a batch has no tensor to compare, but is a {type(found).__name__}")
    return found


def compare(old: list[Tensor] | None, new: list[Tensor] | None) -> tuple[float | None, float | None, int]:
    """Return how far the outputs moved, the share of images with the same largest output, and the number of images."""
    if old is None or new is None:
        return None, None, 0
    images = sum(len(a) for a in old)
    moved = sum(relative(a, b) * len(b) for a, b in zip(new, old, strict=True)) / images
    if old[0].ndim != 2:
        return moved, None, images
    same = sum(int((a.argmax(1) == b.argmax(1)).sum()) for a, b in zip(new, old, strict=True))
    return moved, same / images, images
