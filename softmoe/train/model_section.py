"""The settings of a run's model: the image tower, and a text tower beside it."""

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from softmoe.models import MoEConfig, TextConfig, TwoTowerConfig, ViTConfig, model_config
from softmoe.models.moe_config import LAYER_OPTIONS, option_names, router_options
from softmoe.models.registry import SIZES
from softmoe.storage.architecture import check_numbers
from softmoe.storage.settings import convert, from_dict

_NOT_SHAPE = ("name", "router", "weights", "new_head", "refit_head", "adapters", "locked", "options")


@dataclass(frozen=True)
class ModelSection:
    """A model by name, and what differs from it. None leaves what the name says."""

    name: str = "soft_s16_128e"
    """vit_s16, soft_s16_128e, tokens_choice_b32_32e, ..."""
    weights: str | None = None
    """A saved model to start from; positions are resampled to the new image size. The shape must be its own."""
    new_head: bool | None = None
    """With `weights`: start the head anew. If not given, the head is kept for data of the classes it was trained on."""
    refit_head: bool = False
    """After the last step: fit a new head on four blocks to the training images, in closed form (ridge regression). It
    becomes the model's if it is better on the validation images."""
    adapters: bool = False
    """With `weights`: only the head and the experts beside the MLPs learn, and only they are saved."""
    locked: bool = False
    """With a text tower: the image tower stays as it is, and only the text learns (LiT)."""
    router: str | None = None
    """soft, placed, tokens_choice, experts_choice, identity, uniform, soft_uniform, uniform_soft; or dense."""
    image_size: int | tuple[int, int] | None = None
    """Pixels for which positions are learned; None is the size of the data's images."""
    patch_size: int | None = None
    width: int | None = None
    depth: int | None = None
    mlp_dim: int | None = None
    heads: int | None = None
    num_classes: int | None = None
    """Outputs of the head; None is the number of classes of the training data."""
    pool: Literal["mean", "class", "attention", "concat"] | None = None
    positions: Literal["learned", "sincos", "none"] | None = None
    qk_norm: bool | None = None
    activation: Literal["gelu_tanh", "gelu", "quick_gelu"] | None = None
    dropout: float | None = None
    attention_dropout: float | None = None
    head_dropout: float | None = None
    drop_path: float | None = None
    """Chance that the last block's branches are left out for an image in training; it grows from 0 at the first."""
    representation_size: int | None = None
    """Width of a tanh layer before the head, if any."""
    registers: int | None = None
    """Learned tokens that belong to no cell and are not pooled."""
    layer_scale: bool | None = None
    """What a block adds is multiplied by learned vectors."""
    pre_norm: bool | None = None
    """A norm before the first block."""
    pool_norm: bool | None = None
    """The last norm comes after pooling."""
    norm_eps: float | None = None
    merge: tuple[int, int] | None = None
    """A block and a number, for dense models: after this block (counted from 0) so many merged tokens go on
    (PatchMerger)."""
    head_blocks: tuple[int, ...] | None = None
    """Blocks whose class token and mean of cells the head gets beside the pooled vector."""
    num_experts: int | None = None
    blocks: tuple[int, ...] | None = None
    """Which blocks get experts; the names say the second half."""
    expert_dropout: float | None = None
    identical_init: bool | None = None
    """Start all experts as copies of one draw."""
    expert_dim: int | None = None
    """Hidden width of each expert; None is that of the MLPs."""
    keep_mlp: bool | None = None
    """Experts stand beside the block's MLP, whose output they add to, and not in its place."""
    kept_dim: int | None = None
    """Hidden width of the MLP beside the experts; None is that of the MLPs."""
    slots_stay: bool | None = None
    """After the first block with experts its slots go on as the tokens, each with its expert in all later blocks:
    less work where slots are fewer than tokens."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the router, by the names of its config's fields. Stored files and the command line have them beside
    the other settings of the model: model.top_k."""

    def resolve(self, num_classes: int | None, image_size: int | tuple[int, int]) -> ViTConfig:
        """Return the model's configuration, for data of this many classes and this size."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_SHAPE}
        overrides = {key: value for key, value in given.items() if value is not None}
        for_experts = {key: overrides.pop(key) for key in ("num_experts", *LAYER_OPTIONS) if key in overrides}
        for_experts |= self.options
        config = model_config(
            self.name,
            num_classes=overrides.pop("num_classes", num_classes),
            image_size=overrides.pop("image_size", image_size),
            **overrides,
        )
        if self.router == "dense":
            config, for_experts = replace(config, moe=None), {}
        elif self.router is not None:
            for_experts["router"] = self.router
        elif for_experts and not config.moe:
            raise ValueError(
                f"the model {self.name!r} has no experts, but {', '.join(for_experts)} is set: give model.router too, "
                "or a name such as soft_s16_128e"
            )
        if for_experts:
            config = replace(config, moe=(config.moe or MoEConfig.of()).change(**for_experts))
        check_numbers(config.to_dict(), "model")  # so that what is trained can be opened again
        return config

    def change(self, **settings: Any) -> "ModelSection":
        """Change settings of this section, those of the router among them. Another router keeps the options it has."""
        own = {key: value for key, value in settings.items() if key in {f.name for f in fields(self)}}
        options = {key: value for key, value in settings.items() if key not in own}
        changed = replace(self, **own)
        kept = changed.options
        if (router := changed.router_name) != self.router_name:
            known = () if router == "dense" else option_names(router)
            kept = {key: value for key, value in kept.items() if key in known}
        return replace(changed, options={key: value for key, value in (kept | options).items() if value is not None})

    @property
    def router_name(self) -> str:
        """The router's name, from `router` or else from the model's name; dense without experts."""
        if self.router is not None:
            return self.router
        moe = model_config(self.name).moe
        return "dense" if moe is None else moe.router.name

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return values | values.pop("options")

    @classmethod
    def from_dict(cls, values: Any, path: str = "") -> "ModelSection":
        """Read a section; None stands for what is not set: older runs stored it for every option of every router."""
        if not isinstance(values, dict):
            return from_dict(cls, values, path)  # which says what is wrong
        types = model_options()
        options = {
            name: convert(types[name], value, f"{path}.{name}")
            for name, value in values.items()
            if name in types and value is not None
        }
        own = {name: value for name, value in values.items() if name not in types}
        return replace(from_dict(cls, own, path), options=options)


def model_options() -> dict[str, Any]:
    """Return the options of all routers, with their types, that a section has beside its own settings."""
    return {name: hint for name, hint in router_options().items() if name != "num_experts"}


@dataclass(frozen=True)
class TextSection:
    """A text tower beside the image tower: the model then learns which caption belongs to which image."""

    size: Literal["ti", "s", "b", "l", "h", "g", "G"] | None = None
    """Size of the text tower, by the letters of the image towers; None is no text tower."""
    tokenizer: str | None = None
    """A tokenizer file, .json (tokenizers) or .model (SentencePiece); None learns one from the training captions."""
    vocab_size: int = 8192
    """Tokens to learn, where there is no tokenizer file."""
    lower: bool = True
    """Put texts in lower case."""
    length: int = 16
    """Tokens of a text; longer ones are cut, the end token stays."""
    width: int | None = None
    depth: int | None = None
    mlp_dim: int | None = None
    heads: int | None = None
    pool: Literal["last", "mean", "class", "attention"] = "last"
    mask_padding: bool = False
    """Hide what follows the end of a text. The paper's code does not."""
    num_experts: int | None = None
    """Soft MoE in the second half of the text tower; give mask_padding too, or slots are filled with padding."""
    slots_per_expert: int = 1
    embed_dim: int | None = None
    """Width of the common space, with a projection of the images too; None is the image tower's own."""
    scale_init: float = 10.0
    """Initial factor of the cosines between images and texts."""
    bias_init: float | None = -10.0
    """Initial bias of the logits of the sigmoid loss; None is no bias."""

    def resolve(self, image: ViTConfig, vocab_size: int, end_token: int = 1) -> TwoTowerConfig:
        assert self.size is not None
        width, depth, mlp_dim, heads = SIZES[self.size]
        moe = None
        if self.num_experts is not None:
            moe = MoEConfig.of("soft", self.num_experts, slots_per_expert=self.slots_per_expert)
        text = TextConfig(
            vocab_size=vocab_size,
            length=self.length,
            end_token=end_token,
            width=self.width or width,
            depth=self.depth or depth,
            mlp_dim=self.mlp_dim or mlp_dim,
            heads=self.heads or heads,
            pool=self.pool,
            mask_padding=self.mask_padding,
            moe=moe,
        )
        towers = TwoTowerConfig(image, text, self.embed_dim, self.scale_init, self.bias_init)
        check_numbers(towers.to_dict(), "model")
        return towers
