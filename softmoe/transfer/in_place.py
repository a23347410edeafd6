"""Put experts into the MLPs of any model, in place: timm's, Hugging Face's, open_clip's, torchvision's, your own.

    report = upcycle_(model, mlps="blocks.*.mlp", experts=16, batches=images)
    print(report)                                   which modules, how far the output moved, the cost
    upcycle_(fresh, **report.config)                the same structure again, without data: then load_state_dict

Attention, norms, positions and everything else stay as they are; only the modules that match are exchanged.

Letters: B images, M tokens, D width, H hidden width, N experts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.models import MoEConfig
from softmoe.moe import ExpertsBeside, MoE
from softmoe.moe.record import evaluating
from softmoe.transfer.mlps import (
    AddResidual,
    find_modules,
    has_channels_first,
    hidden_width,
    is_split,
    matrices,
    pick_blocks,
    read_mlp,
    token_width,
    whole_mlp,
)
from softmoe.transfer.upcycling import INITS, NARROW, relative
from softmoe.transfer.upcycling_routers import (
    catch,
    find_tokens_first,
    first_argument,
    first_tensor,
    init_router,
    model_output,
)

MAX_BATCHES = 8  # batches that are used, however many are given


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
    notes: tuple[str, ...] = ()
    """Sentences on what the user should check, such as inputs that have no axis of tokens."""

    def __str__(self) -> str:
        c = self.config
        where = "beside" if c["init"] == "beside" else "in place of"
        few = self.modules if len(self.modules) < 5 else (*self.modules[:3], f"... {self.modules[-1]}")
        lines = [
            f"{c['experts']} experts with {c['slots']} slot{'s' * (c['slots'] > 1)} each {where} {len(self.modules)} "
            f"modules: {', '.join(few)}",
            f"parameters: {self.params:.3f} times as many in the whole model",
        ]
        if self.macs is not None:
            lines += [f"cost: {self.macs:.2f} times the multiply-accumulates of these modules"]
        if self.moved is None:
            return "\n".join([*lines, "the output was not compared: give batches="])
        lines += [f"note: {note}" for note in self.notes]
        same = "" if self.same_class is None else f", the same largest output for {100 * self.same_class:.1f} %"
        return "\n".join([*lines, f"output moved by {self.moved:.4f} of its length on {self.images} images{same}"])


@torch.inference_mode(False)  # parameters made in that mode could not be trained
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
    width: int | Sequence[int] | None = None,
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
    its own) to its output, or to the first part of it; the others put N copies in its place, which must be an MLP of
    two matrices with GELU, or a gated one. `slots` are those of each expert. Inputs of a module may be (B, D),
    (B, M, D), (B, rows, columns, D), (B, D, rows, columns) of convolutions, or with `tokens_first` (M, B, D). This and
    the `width` D, one for all modules or one for each, are found out from batches. `options` are those of the router.
    If it fails, the model is as it was.
    """
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}")
    if (expert_dim or width) and init != "beside":
        raise ValueError(f"experts of init={init!r} are copies of the MLPs: leave out expert_dim and width")
    given = read_batches(batches)
    if not given and init not in ("beside", "copy"):
        raise ValueError(f"init={init!r} looks at the tokens of real images: give batches=, or use init='beside'")
    net, names = without_wrapper(model, pick_blocks(find_modules(model, mlps), blocks))
    widths = [width] * len(names) if isinstance(width, int | None) else width
    if len(widths) != len(names):
        raise ValueError(f"width must be one number, or one for each of {len(names)} modules, got {len(widths)}")
    if not_ours := {"slots_stay", "keep_mlp", "kept_dim"} & {name for name, value in options.items() if value}:
        raise ValueError(f"{min(not_ours)} is for whole models of ours: here init='beside' keeps the modules")
    moe = MoEConfig.of(router, experts, **({"slots_per_expert": slots} if slots != 1 else {}), **options)
    before, old_modules = sum(parameter.numel() for parameter in model.parameters()), set(net.modules())
    made: list[AnyLayout] = []
    macs = [0, 0]
    with evaluating(net), undone_on_error() as put:
        caught, old = catch(net, names, given)
        if tokens_first is None:
            tokens_first = bool(given) and find_tokens_first(net, caught, given[0])
        vectors = [
            f"{name} gets vectors {tuple(x.shape)}" for name, inputs in caught.items() for x in inputs if x.ndim == 2
        ]
        for name, D in zip(names, widths, strict=True):
            mlp = whole_mlp(net.get_submodule(name), name)
            if made and init not in ("beside", "copy"):  # through the layers already exchanged
                caught |= catch(net, [name], given)[0]
            made.append(AnyLayout(make_layer(mlp, moe, init, expert_dim, name, D, caught[name]), tokens_first))
            put_layer(net, name, made[-1], put)
            if given:
                x_BMD = made[-1].all_tokens(caught.pop(name))
                init_router(made[-1].layer, mlp, x_BMD, init)
                for index, number in enumerate(macs_of(mlp, made[-1].layer, x_BMD.shape[1], slots * experts)):
                    macs[index] += number
        new = [model_output(net, batch) for batch in given]
        moved, same = compare(old, new)
    for module in set(net.modules()) - old_modules:
        module.training = net.training
    config = {"mlps": names, "experts": experts, "slots": slots, "init": "beside" if init == "beside" else "copy"}
    config |= {"expert_dim": expert_dim, "router": router, "tokens_first": tokens_first, **options}
    if init == "beside":
        config["width"] = [layout.layer.router.dim for layout in made]
    images = sum(len(first_tensor(batch)) for batch in given)
    after = sum(parameter.numel() for parameter in model.parameters())
    cost = macs[1] / macs[0] if macs[0] else None
    alone = "each is taken for an image of one token, and none are mixed; tokens need an axis of images before theirs"
    notes = (f"{vectors[0]}: {alone}",) if vectors else ()
    return InPlace(model, config, tuple(names), images, moved, same, cost, after / before, notes)


class AnyLayout(nn.Module):
    """Gives an MoE layer its tokens as (B, M, D), whatever the layout of the model around it.

    That may be (B, D), (B, M, D), (M, B, D) with `tokens_first`, (B, rows, columns, D), or (B, D, rows, columns) if
    the kept module is made of convolutions. A kept module gets its arguments as they came.
    """

    def __init__(self, layer: MoE, tokens_first: bool = False):
        super().__init__()
        self.layer = layer
        self.tokens_first = tokens_first
        self.channels_first = isinstance(layer, ExpertsBeside) and has_channels_first(layer.mlp)

    def forward(self, *given: Any, **named: Any) -> Any:
        x = first_argument(given, named)
        mixed_BMD = MoE.forward(self.layer, self.tokens(x), None, self.grid(x))  # without what the layer keeps
        mixed = self.back(mixed_BMD, x)
        if not isinstance(self.layer, ExpertsBeside):
            return mixed
        kept = self.layer.mlp(*given, **named)
        return (kept[0] + mixed, *kept[1:]) if isinstance(kept, tuple) else kept + mixed

    def tokens(self, x: Tensor) -> Tensor:
        """Bring an input of the module to (B, M, D)."""
        if self.channels_first:
            return x.flatten(2).transpose(1, 2)
        if x.ndim == 3:
            return x.transpose(0, 1) if self.tokens_first else x
        return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)

    def back(self, y_BMD: Tensor, x: Tensor) -> Tensor:
        """Bring (B, M, D) to the layout of the input `x`."""
        if self.channels_first:
            return y_BMD.transpose(1, 2).reshape(x.shape)
        return y_BMD.transpose(0, 1) if x.ndim == 3 and self.tokens_first else y_BMD.reshape(x.shape)

    def grid(self, x: Tensor) -> tuple[int, int] | None:
        """Return rows and columns for a router that uses places. ValueError if the input has none."""
        if not self.layer.router.takes_grid:
            return None
        if x.ndim != 4:
            raise ValueError(
                "a router with places needs inputs with rows and columns, as (images, rows, columns, width), but this "
                f"module gets {tuple(x.shape)}: use router='soft'"
            )
        rows, columns = x.shape[2:] if self.channels_first else x.shape[1:3]
        return rows, columns

    def all_tokens(self, inputs: list[Tensor]) -> Tensor:
        """Return the tokens of all batches that are shaped as the first."""
        tokens = [self.tokens(x) for x in inputs]
        return torch.cat([x_BMD for x_BMD in tokens if x_BMD.shape[1:] == tokens[0].shape[1:]])


def without_wrapper(model: nn.Module, names: list[str]) -> tuple[nn.Module, list[str]]:
    """Return the model inside nn.DataParallel, and the names as they are there."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("DistributedDataParallel does not see new parameters: upcycle_ the model first, then wrap it")
    if not isinstance(model, nn.DataParallel):
        return model, names
    return model.module, [name.removeprefix("module.") for name in names]


@contextmanager
def undone_on_error() -> Iterator[Callable[[nn.Module, str, nn.Module], None]]:
    """Give a function that puts a module into another; if the context fails, all the old ones are put back."""
    old: list[tuple[nn.Module, str, nn.Module]] = []

    def put(parent: nn.Module, leaf: str, module: nn.Module) -> None:
        old.append((parent, leaf, parent.get_submodule(leaf)))
        setattr(parent, leaf, module)

    try:
        yield put
    except BaseException:
        for parent, leaf, module in reversed(old):
            setattr(parent, leaf, module)
        raise


def put_layer(model: nn.Module, name: str, layer: nn.Module, put: Callable[[nn.Module, str, nn.Module], None]) -> None:
    """Put a layer in the place of the MLP called `name`."""
    module = model.get_submodule(name)
    if is_split(module):
        put(module, "intermediate", layer)
        put(module, "output", AddResidual())
        return
    parent, _, leaf = name.rpartition(".")
    put(model.get_submodule(parent), leaf, layer)


def make_layer(
    mlp: nn.Module, moe: MoEConfig, init: str, expert_dim: int | None, name: str, dim: int | None, inputs: list[Tensor]
) -> MoE:
    """Make the layer that takes an MLP's place, with the MLP inside or with experts that are copies of it."""
    first = matrices(mlp)[0]
    with torch.device(first.device):
        if init == "beside":
            if inputs:
                dim = inputs[0].shape[1 if has_channels_first(mlp) else -1]
            D = dim or token_width(mlp)
            if D is None:
                raise ValueError(
                    f"{name}, a {type(mlp).__name__}, does not return the width of its input for tokens alone: mlps= "
                    "must name MLPs, or give batches= if it needs more arguments"
                )
            fresh = moe.make_layer(D, expert_dim or max(1, hidden_width(mlp, D) // NARROW), 0.0, "gelu")
            layer = ExpertsBeside(mlp, fresh.router, fresh.experts)  # pyright: ignore
        else:
            copies = read_mlp(mlp, name).copies(moe.num_experts)
            layer = MoE(moe.router.build(copies.dim), copies)  # pyright: ignore
    return layer.to(first.dtype)


def macs_of(mlp: nn.Module, layer: MoE, tokens: int, rows: int) -> tuple[int, int]:
    """Count an image's multiply-accumulates, in the MLP and in the layer, for so many tokens and slots (`rows`)."""
    dense = tokens * sum(weight.numel() for weight in matrices(mlp))
    expert = sum(parameter[0].numel() for parameter in layer.experts.parameters() if parameter.ndim == 3)
    kept = dense if isinstance(layer, ExpertsBeside) else 0
    return dense, kept + 3 * tokens * rows * layer.router.dim + rows * expert


def read_batches(batches: Any) -> list[Any]:
    """Return a few batches of one kind, or none where none are given."""
    if batches is None:
        return []
    if not isinstance(batches, Iterable):
        raise ValueError(f"batches must be inputs of the model, such as a tensor of images, got {batches!r}")
    given = [batches] if isinstance(batches, Tensor | Mapping | tuple) else list(islice(batches, MAX_BATCHES))
    if not given:
        raise ValueError("batches= is empty: give a tensor of images, or several batches, or leave it out")
    first = first_tensor(given[0])
    for x in map(first_tensor, given):
        if x.ndim != first.ndim or x.is_floating_point() != first.is_floating_point():
            raise ValueError(
                f"batches must be alike, but the first is {first.dtype} {tuple(first.shape)} and another {x.dtype} "
                f"{tuple(x.shape)}: a list has several batches, and a tuple (images, labels) is one"
            )
    return given


def compare(old: list[Tensor], new: list[Tensor]) -> tuple[float | None, float | None]:
    """Return how far the outputs moved, and the share of images with the same largest output."""
    if not old:
        return None, None
    rows = [len(b) for b in old]
    pairs = [(a.reshape(len(a), -1), b.reshape(len(b), -1)) for a, b in zip(new, old, strict=True)]
    moved = sum(relative(a, b) * len(b) for a, b in pairs) / sum(rows)
    if old[0].ndim != 2:
        return moved, None
    return moved, sum(int((a.argmax(1) == b.argmax(1)).sum()) for a, b in pairs) / sum(rows)
