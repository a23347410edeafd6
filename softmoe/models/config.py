"""What a model is: plain frozen settings, kept beside every saved model."""

from dataclasses import asdict, dataclass
from typing import Any

from softmoe.moe import (
    Experts,
    ExpertsChoiceRouter,
    IdentityRouter,
    MoE,
    Router,
    SoftRouter,
    SoftUniformRouter,
    TokensChoiceRouter,
    UniformRouter,
    UniformSoftRouter,
)

ROUTERS: dict[str, type[Router]] = {
    "soft": SoftRouter,
    "tokens_choice": TokensChoiceRouter,
    "experts_choice": ExpertsChoiceRouter,
    "identity": IdentityRouter,
    "uniform": UniformRouter,
    "soft_uniform": SoftUniformRouter,
    "uniform_soft": UniformSoftRouter,
}
_OPTIONS = {  # which settings each router takes
    "soft": ("slots_per_expert", "normalize", "noise_std", "scale_init"),
    "tokens_choice": (
        "top_k",
        "capacity_factor",
        "batch_priority",
        "group_size",
        "noise_std",
        "importance_weight",
        "load_weight",
        "gshard_weight",
    ),
    "experts_choice": ("capacity_factor", "group_size", "noise_std"),
    "identity": (),
    "uniform": ("slots_per_expert",),
    "soft_uniform": ("slots_per_expert", "normalize", "noise_std", "scale_init"),
    "uniform_soft": ("slots_per_expert", "normalize", "noise_std", "scale_init"),
}


@dataclass(frozen=True)
class MoEConfig:
    """The MoE layers of a model. Settings that a router does not know are not used by it."""

    router: str = "soft"
    """One of: soft, tokens_choice, experts_choice, identity, uniform, soft_uniform, uniform_soft."""
    num_experts: int = 128
    slots_per_expert: int = 1
    blocks: tuple[int, ...] | None = None
    """Which blocks get an MoE; None is the second half."""
    expert_dropout: float | None = None
    """Dropout inside the experts; None is the model's dropout."""
    identical_init: bool = False
    """Start all experts as copies of one draw."""
    normalize: bool = True
    """Soft: normalize tokens and slot parameters."""
    scale_init: float = 1.0
    """Soft: the first value of the learned scale of the logits."""
    noise_std: float | None = None
    """Noise on the logits in training; None is 0 for soft routers and 1 for sparse ones."""
    top_k: int = 1
    capacity_factor: float = 1.0
    batch_priority: bool = True
    group_size: int | None = None
    """Sparse: tokens that are routed together; None is one image."""
    importance_weight: float = 0.005
    load_weight: float = 0.005
    gshard_weight: float = 0.0

    def make_router(self, dim: int) -> Router:
        if self.router not in ROUTERS:
            raise ValueError(f"unknown router {self.router!r}, expected one of: {', '.join(ROUTERS)}")
        options: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS[self.router]}
        if options.get("noise_std", 0.0) is None:
            options["noise_std"] = 1.0 if self.router in ("tokens_choice", "experts_choice") else 0.0
        return ROUTERS[self.router](dim, self.num_experts, **options)

    def make_layer(self, dim: int, hidden_dim: int, dropout: float, activation: str = "gelu_tanh") -> MoE:
        if self.expert_dropout is not None:
            dropout = self.expert_dropout
        experts = Experts(
            dim,
            hidden_dim,
            self.num_experts,
            dropout=dropout,
            identical_init=self.identical_init,
            activation=activation,
        )
        return MoE(self.make_router(dim), experts)

    def moe_blocks(self, depth: int) -> tuple[int, ...]:
        blocks = tuple(range(depth - depth // 2, depth)) if self.blocks is None else tuple(self.blocks)
        outside = [index for index in blocks if not 0 <= index < depth]
        if outside or len(set(blocks)) != len(blocks):
            raise ValueError(f"MoE blocks must be different indices from 0 to {depth - 1}, got {list(blocks)}")
        return blocks


@dataclass(frozen=True)
class ViTConfig:
    """A vision transformer; the defaults are the paper's S/16 without experts."""

    image_size: int | tuple[int, int] = 224
    """Pixels, or (height, width)."""
    patch_size: int = 16
    width: int = 384
    depth: int = 12
    mlp_dim: int = 1536
    heads: int = 6
    num_classes: int | None = 1000
    """None gives a model without a head, which returns features."""
    pool: str = "mean"
    """One of: mean, class, attention."""
    positions: str = "learned"
    """One of: learned, sincos, none."""
    qk_norm: bool = True
    activation: str = "gelu_tanh"
    """gelu_tanh, as in the paper's code, or gelu: the exact one, for weights from elsewhere."""
    dropout: float = 0.0
    attention_dropout: float = 0.0
    representation_size: int | None = None
    """Width of a tanh layer before the head, if any."""
    moe: MoEConfig | None = None

    @property
    def image_shape(self) -> tuple[int, int]:
        size = self.image_size
        return (size, size) if isinstance(size, int) else (size[0], size[1])

    @property
    def grid(self) -> tuple[int, int]:
        height, width = self.image_shape
        return height // self.patch_size, width // self.patch_size

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] + (self.pool == "class")

    @property
    def moe_blocks(self) -> tuple[int, ...]:
        return self.moe.moe_blocks(self.depth) if self.moe else ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ViTConfig":
        values = with_moe(values)
        if isinstance(values.get("image_size"), list):
            values["image_size"] = tuple(values["image_size"])
        return cls(**values)


def with_moe(values: dict[str, Any]) -> dict[str, Any]:
    """A copy whose table `moe`, if there is one, is a MoEConfig."""
    if not values.get("moe"):
        return dict(values)
    moe = dict(values["moe"])
    moe["blocks"] = None if moe.get("blocks") is None else tuple(moe["blocks"])
    return dict(values) | {"moe": MoEConfig(**moe)}


@dataclass(frozen=True)
class TextConfig:
    """A transformer for text; the defaults are the text tower of the paper's LAION-400M models."""

    vocab_size: int = 32_000
    length: int = 16
    """Most tokens of a text."""
    end_token: int = 1
    """The token that ends every text, and fills up what is left of it."""
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    heads: int = 12
    pool: str = "last"
    """One of: last, mean, class, attention."""
    mask_padding: bool = False
    """Hide what follows the first end token from attention, experts and pooling. The paper's code does not."""
    qk_norm: bool = True
    activation: str = "gelu_tanh"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    moe: MoEConfig | None = None

    @property
    def tokens(self) -> int:
        return self.length + (self.pool == "class")

    @property
    def moe_blocks(self) -> tuple[int, ...]:
        return self.moe.moe_blocks(self.depth) if self.moe else ()


@dataclass(frozen=True)
class TwoTowerConfig:
    """An image tower and a text tower that end in one space."""

    image: ViTConfig
    text: TextConfig
    embed_dim: int | None = None
    """Width of the common space, which both towers are projected to; None is the image tower's, as it comes."""
    scale_init: float = 10.0
    """First factor of the cosines; its logarithm is learned."""
    bias_init: float | None = -10.0
    """First value of a learned number added to the logits; None is none (the softmax loss does not see one)."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TwoTowerConfig":
        values = dict(values)
        image, text = ViTConfig.from_dict(values.pop("image")), TextConfig(**with_moe(values.pop("text")))
        return cls(image, text, **values)
