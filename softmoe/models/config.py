"""The configurations that models are built from, stored beside every saved model. They load without torch."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from softmoe.models.moe_config import MoEConfig
from softmoe.moe.config import make_plain


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
    """One of: mean, class, attention, concat. The last puts all tokens side by side, so the head has weights of its own
    for each: for models in which slots stay or tokens are merged, whose last tokens are as many at any image size."""
    positions: str = "learned"
    """One of: learned, sincos, none."""
    qk_norm: bool = True
    activation: str = "gelu_tanh"
    """gelu_tanh, as in the paper's code; for weights from elsewhere gelu, the exact one, or quick_gelu, CLIP's."""
    dropout: float = 0.0
    """The dropout of embedded patches, of what attention and MLP add in every block, and of MLPs' hidden layers."""
    attention_dropout: float = 0.0
    head_dropout: float = 0.0
    """The dropout of the vector that the head gets."""
    drop_path: float = 0.0
    """Stochastic depth: the chance that the last block's branches are skipped in training; 0 at the first block."""
    representation_size: int | None = None
    """Width of a tanh layer before the head, if any."""
    registers: int = 0
    """Learned tokens after the class token, if there is one, that belong to no patch and are not pooled (DINOv2)."""
    layer_scale: bool = False
    """Multiply the output of each branch of a block by a learned vector (DeiT-III, DINOv2)."""
    pre_norm: bool = False
    """Have a norm before the first block (CLIP)."""
    pool_norm: bool = False
    """Apply the last norm after pooling instead of before (MAE, DeiT-III with mean pooling)."""
    norm_eps: float = 1e-6
    merge: tuple[int, int] | None = None
    """(block, tokens), for models without experts: after this block, counted from 0, so many merged tokens go on in
    place of the cells' (PatchMerger)."""
    head_blocks: tuple[int, ...] = ()
    """Blocks, counted from 0, whose class token and mean of cells the head gets beside the pooled vector."""
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        make_plain(self)

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
        return self.grid[0] * self.grid[1] + self.prefix

    @property
    def tokens_by_block(self) -> tuple[int, ...]:
        """The number of tokens that enter each block, and, last, of those that leave the last one."""
        if self.last_map is None:
            return (self.tokens,) * (self.depth + 1)
        if self.merge is not None:
            fewer = self.prefix + self.merge[1]
        else:
            assert self.moe is not None
            fewer = self.moe.num_experts * vars(self.moe.router)["slots_per_expert"]
        return (self.tokens,) * (self.last_map + 1) + (fewer,) * (self.depth - self.last_map)

    @property
    def last_map(self) -> int | None:
        """The block after which tokens are no longer those of the image's cells; None if they always are."""
        if self.merge is not None:
            return self.merge[0]
        return min(self.moe_blocks) if self.moe and self.moe.slots_stay and self.moe_blocks else None

    @property
    def prefix(self) -> int:
        """The number of tokens before those of the patches: class token and registers."""
        return (self.pool == "class") + self.registers

    @property
    def head_width(self) -> int:
        """The width of the vector that the head gets."""
        each = self.width * (2 if self.pool == "class" else 1)
        return (self.representation_size or self.pooled_width) + each * len(self.head_blocks)

    @property
    def pooled_width(self) -> int:
        """The width of the pooled vector."""
        return self.width * (self.tokens_by_block[-1] - self.prefix if self.pool == "concat" else 1)

    @property
    def moe_blocks(self) -> tuple[int, ...]:
        return self.moe.moe_blocks(self.depth) if self.moe else ()

    def to_dict(self) -> dict[str, Any]:
        return tower_dict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ViTConfig":
        return cls(**with_moe(values))


def with_moe(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy whose value of `moe`, if there is one, is a MoEConfig."""
    return dict(values) | {"moe": MoEConfig.from_dict(values["moe"])} if values.get("moe") else dict(values)


@dataclass(frozen=True)
class TextConfig:
    """A transformer for text; the defaults are the text tower of the paper's LAION-400M models."""

    vocab_size: int = 32_000
    length: int = 16
    """The largest number of tokens of a text."""
    end_token: int = 1
    """The token that ends every text and pads it."""
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    heads: int = 12
    pool: str = "last"
    """One of: last, mean, class, attention."""
    mask_padding: bool = False
    """Mask the padding in attention, experts and pooling. The paper's code does not."""
    qk_norm: bool = True
    activation: str = "gelu_tanh"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        make_plain(self)

    @property
    def tokens(self) -> int:
        return self.length + (self.pool == "class")

    @property
    def moe_blocks(self) -> tuple[int, ...]:
        return self.moe.moe_blocks(self.depth) if self.moe else ()


@dataclass(frozen=True)
class TwoTowerConfig:
    """An image tower and a text tower that embed into one space."""

    image: ViTConfig
    text: TextConfig
    embed_dim: int | None = None
    """Width of the common space, to which both towers are projected; None is that of the image tower's features."""
    scale_init: float = 10.0
    """Initial factor of the cosines; its logarithm is learned."""
    bias_init: float | None = -10.0
    """Initial value of a learned bias of the logits; None is no bias (the softmax loss does not use one)."""

    def __post_init__(self) -> None:
        make_plain(self)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"image": tower_dict(self.image), "text": tower_dict(self.text)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TwoTowerConfig":
        values = dict(values)
        image, text = ViTConfig.from_dict(values.pop("image")), TextConfig(**with_moe(values.pop("text")))
        return cls(image, text, **values)


def tower_dict(tower: ViTConfig | TextConfig) -> dict[str, Any]:
    return asdict(tower) | {"moe": tower.moe and tower.moe.to_dict()}


_FUNCTION = ("patch_size", "width", "depth", "mlp_dim", "heads", "pool", "positions", "qk_norm", "activation")
_PARTS = ("representation_size", "registers", "layer_scale", "pre_norm", "pool_norm", "norm_eps")
_ROUTING = ("router", "num_experts", "slots_per_expert", "normalize", "combine_place", "slots_stay")


def check_same_function(old: ViTConfig, new: ViTConfig, name: str) -> None:
    """Raise a ValueError that names every difference between two architectures, if there is one."""
    if old.moe is None and new.moe is not None and new.moe.kept_width(new.mlp_dim) == new.mlp_dim:
        new = replace(new, moe=None)
    before, after = weight_facts(old), weight_facts(new)
    differences = [
        f"{key} {before.get(key)} and {after.get(key)}" for key in before | after if before.get(key) != after.get(key)
    ]
    if differences:
        raise ValueError(f"the weights in {name} are of another model than this run's: {'; '.join(differences)}")


def weight_facts(config: ViTConfig) -> dict[str, Any]:
    """Return the settings on which the names, shapes and meaning of the weights depend."""
    facts = {key: getattr(config, key) for key in (*_FUNCTION, *_PARTS)}
    if config.moe is not None:
        facts |= {key: value for key, value in config.moe.to_dict().items() if key in _ROUTING}
        facts |= {"blocks": config.moe_blocks, "expert_dim": config.moe.hidden_dim(config.mlp_dim)}
        facts |= {"kept_dim": config.moe.kept_width(config.mlp_dim)}
    return facts
