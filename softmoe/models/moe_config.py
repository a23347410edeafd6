"""The configuration of the MoE layers of a model, stored beside every saved model. It loads without torch."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from softmoe.moe.config import ROUTERS, RouterConfig, SoftConfig, make_plain

if TYPE_CHECKING:
    from torch import nn

    from softmoe.moe import MoE

_FORMER_OPTIONS = {  # the keys of an MoE in config.json when all routers shared one list of options
    *("router", "num_experts", "slots_per_expert", "blocks", "expert_dropout", "identical_init", "normalize"),
    *("scale_init", "noise_std", "top_k", "capacity_factor", "batch_priority", "group_size", "importance_weight"),
    *("load_weight", "gshard_weight"),
}


@dataclass(frozen=True)
class MoEConfig:
    """The MoE layers of a model: the router with its options, and which blocks have which experts."""

    router: RouterConfig
    blocks: tuple[int, ...] | None = None
    """The blocks that have an MoE; None is the second half."""
    expert_dropout: float | None = None
    """Dropout inside the experts; None is the model's dropout."""
    identical_init: bool = False
    """Start all experts as copies of one draw."""
    expert_dim: int | None = None
    """Hidden width of each expert; None is that of the model's MLPs."""
    keep_mlp: bool = False
    """Keep the block's MLP and add the experts' output to it, instead of replacing it."""
    kept_dim: int | None = None
    """Hidden width of the MLP that is kept; None is that of the model's MLPs."""
    slots_stay: bool = False
    """After the first block with experts its slots go on as the tokens, each with its expert in all later blocks."""

    def __post_init__(self) -> None:
        make_plain(self)
        if self.slots_stay and self.keep_mlp:
            raise ValueError("keep_mlp is for tokens, and with slots_stay there are slots alone: leave out one of them")
        if self.slots_stay and not can_stay(self.router):
            raise ValueError(
                f"slots_stay needs a learned dispatch, as soft and placed have: not {self.router.name!r}, "
                "or set slots_stay to False"
            )
        if self.kept_dim is not None and not self.keep_mlp:
            raise ValueError(f"kept_dim is the width of an MLP beside the experts, got {self.kept_dim}: set keep_mlp")

    @classmethod
    def of(cls, router: str = "soft", num_experts: int = 128, **options: Any) -> "MoEConfig":
        """Make a config with the router of this name. Options are fields of this class and of the router's config."""
        options["num_experts"] = num_experts
        known = option_names(router)
        for name in options:
            if name not in known:
                raise no_option(router, name)
        layer = {name: options.pop(name) for name in LAYER_OPTIONS if name in options}
        return cls(ROUTERS[router](**options), **layer)

    def change(self, **options: Any) -> "MoEConfig":
        """Return a copy with other options. A new router keeps the number of experts and, if it has any, of slots."""
        router = options.get("router", self.router.name)
        kept = vars(self.router)
        if router != self.router.name:
            kept = {name: value for name, value in kept.items() if name in ("num_experts", "slots_per_expert")}
            kept = {name: value for name, value in kept.items() if name in option_names(router)}
        layer = {name: getattr(self, name) for name in LAYER_OPTIONS}
        return MoEConfig.of(**(layer | kept | options | {"router": router}))

    @property
    def num_experts(self) -> int:
        return self.router.num_experts

    def make_layer(
        self,
        dim: int,
        mlp_dim: int,
        dropout: float,
        activation: str = "gelu_tanh",
        *,
        kept: "nn.Module | None" = None,
        on_slots: bool = False,
    ) -> "MoE":
        """Build one MoE layer. With `keep_mlp`, `kept` is the MLP that the experts are added to.

        `on_slots` is for the layers behind the one in which tokens become slots that stay.
        """
        from softmoe.moe import Experts, ExpertsBeside, MoE, SlotsRouter, ToSlots

        assert (kept is not None) == self.keep_mlp
        if self.expert_dropout is not None:
            dropout = self.expert_dropout
        experts = Experts(
            dim,
            self.hidden_dim(mlp_dim),
            self.num_experts,
            dropout=dropout,
            identical_init=self.identical_init,
            activation=activation,
        )
        if on_slots:
            return MoE(SlotsRouter(dim, self.num_experts, vars(self.router)["slots_per_expert"]), experts)
        router = self.router.build(dim)
        if kept is not None:
            return ExpertsBeside(kept, router, experts)
        return ToSlots(router, experts) if self.slots_stay else MoE(router, experts)

    def hidden_dim(self, mlp_dim: int) -> int:
        """Return the hidden width of the experts of a model whose MLPs have this one."""
        return mlp_dim if self.expert_dim is None else self.expert_dim

    def kept_width(self, mlp_dim: int) -> int:
        """Return the hidden width of the MLP beside the experts, 0 without one."""
        return 0 if not self.keep_mlp else mlp_dim if self.kept_dim is None else self.kept_dim

    def moe_blocks(self, depth: int) -> tuple[int, ...]:
        half = max(1, depth // 2)  # a single block has them
        blocks = tuple(range(depth - half, depth)) if self.blocks is None else tuple(self.blocks)
        outside = [index for index in blocks if not 0 <= index < depth]
        if outside or len(set(blocks)) != len(blocks):
            raise ValueError(f"MoE blocks must be different indices from 0 to {depth - 1}, got {list(blocks)}")
        if self.slots_stay and sorted(blocks) != list(range(min(blocks, default=0), depth)):
            raise ValueError(
                f"with slots_stay all blocks from the first with experts on have them, up to {depth - 1}, "
                f"got {list(blocks)}"
            )
        return blocks

    def to_dict(self) -> dict[str, Any]:
        """Return the router's name, its options and those of the layers as one flat dictionary."""
        layer = {name: getattr(self, name) for name in LAYER_OPTIONS}
        return {"router": self.router.name, **vars(self.router), **layer}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MoEConfig":
        return cls.of(**without_unused_options(values))


def can_stay(router: RouterConfig) -> bool:
    """Tell if the slots of this router may go on as tokens: learned averages, each of its own."""
    return isinstance(router, SoftConfig) and router.name not in ("soft_uniform", "uniform_soft")


LAYER_OPTIONS = tuple(f.name for f in fields(MoEConfig) if f.name != "router")


def option_names(router: str) -> tuple[str, ...]:
    """List the options of MoE layers with this router."""
    if router not in ROUTERS:
        raise ValueError(f"unknown router {router!r}, expected one of: {', '.join(ROUTERS)}, or dense for none")
    return (*(f.name for f in fields(ROUTERS[router])), *LAYER_OPTIONS)


def router_options() -> dict[str, Any]:
    """Return the options of all routers, with their types."""
    types: dict[str, Any] = {}
    for config in ROUTERS.values():
        hints = get_type_hints(config)
        types |= {f.name: types.get(f.name, hints[f.name]) | hints[f.name] for f in fields(config)}
    return types


def no_option(router: str, name: str, others: Iterable[str] = (), what: str = "option") -> ValueError:
    """Return the error for an option that this router, or every router, lacks. `others` are names to suggest too."""
    if name in router_options():
        own = ", ".join(f.name for f in fields(ROUTERS[router]))
        return ValueError(f"the router {router!r} has no option {name!r}; it has {own}")
    near = difflib.get_close_matches(name, [*option_names(router), *others], n=1, cutoff=0.0)[0]
    return ValueError(f"unknown {what} {name!r}, did you mean {near!r}?")


def without_unused_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the MoE section of a config.json, reduced to the options of its router if it is an old one.

    Old files have the options of all routers, used or not, and null for the router's own default noise.
    """
    if set(values) != _FORMER_OPTIONS:
        return dict(values)
    known = ("router", *option_names(values["router"]))
    return {k: v for k, v in values.items() if k in known and not (k == "noise_std" and v is None)}
