"""The options of every router as frozen dataclasses, which load without torch: `build` loads the router itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from softmoe.moe.routing import Router

ROUTERS: "dict[str, type[RouterConfig]]" = {}
"""The configuration class of every router, by the router's name. Defining such a class registers it."""


@dataclass(frozen=True)
class RouterConfig(ABC):
    """The options of one router. Its fields are the arguments of the router's constructor, except `dim`.

    `class MineConfig(RouterConfig, name="mine")` makes the router known to model names, recipes and the command line.
    """

    name: ClassVar[str]
    num_experts: int

    def __init_subclass__(cls, *, name: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if name is not None:
            cls.name = name
            ROUTERS[name] = cls

    def __post_init__(self) -> None:
        make_plain(self)

    @abstractmethod
    def build(self, dim: int) -> "Router":
        """Make the router for tokens of width `dim`."""


@dataclass(frozen=True)
class SoftConfig(RouterConfig, name="soft"):
    slots_per_expert: int = 1
    normalize: bool = True
    """Normalize tokens and slot vectors. False gives plain logits x @ phi, as in the paper's study of collapse."""
    noise_std: float = 0.0
    """Standard deviation of the Gaussian noise added to the logits in training mode."""
    scale_init: float = 1.0
    """Initial value of the learned scale of the normalized logits."""

    def build(self, dim: int) -> "Router":
        from softmoe.moe.soft import SoftRouter

        return SoftRouter(dim, **vars(self))


@dataclass(frozen=True)
class PlacedConfig(SoftConfig, name="placed"):
    place_init: float = 4.0
    """How much a slot's logit falls, at the start, from its center to the next one on the grid of centers."""
    frame: bool = False
    """Measure places in a frame that is found in each image, not in the image itself."""
    combine_place: bool = True
    """Let places count in combine too. False: they say what a slot takes, and content alone where its output goes."""

    def build(self, dim: int) -> "Router":
        from softmoe.moe.placed import PlacedRouter

        return PlacedRouter(dim, **vars(self))


@dataclass(frozen=True)
class SparseConfig(RouterConfig):
    """The options that both sparse routers have."""

    capacity_factor: float = 1.0
    """Slots of the experts, as a multiple of those needed if all experts get equally many tokens."""
    group_size: int | None = None
    """Tokens that are routed together; None is one image."""
    noise_std: float = 1.0
    """The noise on the logits in training has this standard deviation divided by the number of experts."""
    capacity: int | None = None
    """Slots per expert and group, whatever the factor."""
    capacity_rounding: str = "round"
    """round (half to even) or ceil."""
    capacity_multiple_of: int = 1


@dataclass(frozen=True)
class TokensChoiceConfig(SparseConfig, name="tokens_choice"):
    top_k: int = 1
    """The number of experts that each token picks."""
    batch_priority: bool = True
    """Serve tokens with larger gates first, instead of in their order."""
    importance_weight: float = 0.005
    load_weight: float = 0.005
    gshard_weight: float = 0.0

    def build(self, dim: int) -> "Router":
        from softmoe.moe.sparse import TokensChoiceRouter

        return TokensChoiceRouter(dim, **vars(self))


@dataclass(frozen=True)
class ExpertsChoiceConfig(SparseConfig, name="experts_choice"):
    def build(self, dim: int) -> "Router":
        from softmoe.moe.sparse import ExpertsChoiceRouter

        return ExpertsChoiceRouter(dim, **vars(self))


@dataclass(frozen=True)
class IdentityConfig(RouterConfig, name="identity"):
    def build(self, dim: int) -> "Router":
        from softmoe.moe.fixed import IdentityRouter

        return IdentityRouter(dim, **vars(self))


@dataclass(frozen=True)
class UniformConfig(RouterConfig, name="uniform"):
    slots_per_expert: int = 1

    def build(self, dim: int) -> "Router":
        from softmoe.moe.fixed import UniformRouter

        return UniformRouter(dim, **vars(self))


@dataclass(frozen=True)
class SoftUniformConfig(SoftConfig, name="soft_uniform"):
    def build(self, dim: int) -> "Router":
        from softmoe.moe.fixed import SoftUniformRouter

        return SoftUniformRouter(dim, **vars(self))


@dataclass(frozen=True)
class UniformSoftConfig(SoftConfig, name="uniform_soft"):
    def build(self, dim: int) -> "Router":
        from softmoe.moe.fixed import UniformSoftRouter

        return UniformSoftRouter(dim, **vars(self))


def make_plain(config: Any) -> None:
    """Turn the values of a frozen config into those that JSON gives back.

    An integer for a float becomes a float, a sequence a tuple, and a number of NumPy or torch one of Python.
    """
    hints = get_type_hints(type(config))
    for f in fields(config):
        object.__setattr__(config, f.name, _plain(getattr(config, f.name), hints[f.name]))


def _plain(value: Any, hint: Any) -> Any:
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if getattr(value, "shape", None) == ():
        value = value.item()
    if float in members and type(value) is int:
        return float(value)
    if any(get_origin(member) is tuple for member in members) and isinstance(value, Iterable):
        return value if isinstance(value, str) else tuple(_plain(one, int) for one in value)
    return value
