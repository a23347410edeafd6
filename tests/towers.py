"""Plain stand-ins for other libraries' vision transformers: their names and shapes, and forward passes of a few lines.

Every tower is 2 blocks of width 16 with 2 heads for images of 12 x 12 in patches of 4, with random weights, in float64.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tower_parts import (
    CELLS,
    CLASSES,
    HEADS,
    Block,
    Box,
    Call,
    D,
    H,
    SplitBlock,
    attend,
    cells,
    conv,
    in_front,
    mlp,
    norm,
    packed_attention,
    randomize,
    split_attention,
    swiglu_packed,
    tokens,
)


class Timm(Box):
    """timm's VisionTransformer, also as DINOv2, DeiT and MAE publish theirs. `pool`: token, avg or map; `rows` is how
    many of the tokens in front have positions."""

    def __init__(
        self,
        pool: str = "token",
        class_token: bool = True,
        registers: int = 0,
        rows: int = 1,
        layer_scale: bool = False,
        norm_pre: bool = False,
        fc_norm: bool = False,
        act: Callable[[Tensor], Tensor] = F.gelu,
        eps: float = 1e-6,
        make_mlp: Callable[[], nn.Module] | None = None,
        classes: int | None = CLASSES,
        register_name: str = "reg_token",
        mask_token: bool = False,
        attention: Callable[[], nn.Module] = packed_attention,
    ):
        scale = "ls{}.gamma" if layer_scale else None
        super().__init__(patch_embed=Box(proj=conv(not norm_pre)), pos_embed=tokens(1, rows + CELLS, D))
        if class_token:
            self.cls_token = tokens(1, 1, D)
        if registers:
            setattr(self, register_name, tokens(1, registers, D))
        if mask_token:
            self.mask_token = tokens(1, D)
        self.blocks = nn.Sequential(
            *(
                Block(
                    {}, scale, attn=attention(), mlp=make_mlp() if make_mlp else mlp(act=act), norm1=norm(eps),
                    norm2=norm(eps),
                )
                for _ in range(2)
            )
        )  # fmt: skip
        if norm_pre:
            self.norm_pre = norm(eps)
        setattr(self, "fc_norm" if fc_norm else "norm", norm(eps))
        if pool == "map":
            self.attn_pool = Box(
                latent=tokens(1, 1, D), q=nn.Linear(D, D), kv=nn.Linear(D, 2 * D), proj=nn.Linear(D, D),
                norm=norm(eps), mlp=mlp(act=act),
            )  # fmt: skip
        if classes:
            self.head = nn.Linear(D, classes)
        self.pool, self.rows, self.register_name = pool, rows, register_name
        randomize(self)

    def forward_features(self, images: Tensor) -> Tensor:
        x = cells(self.patch_embed.proj, images)
        front = [getattr(self, name) for name in ("cls_token", self.register_name) if hasattr(self, name)]
        self.prefix = sum(token.shape[1] for token in front)
        position = F.pad(self.pos_embed[:, : self.rows], (0, 0, 0, self.prefix - self.rows))
        x = in_front(x, *front) + torch.cat([position, self.pos_embed[:, self.rows :]], dim=1)
        x = self.blocks(self.norm_pre(x) if hasattr(self, "norm_pre") else x)
        return self.norm(x) if hasattr(self, "norm") else x

    def forward(self, images: Tensor) -> Tensor:
        x = self.forward_features(images)
        if self.pool == "map":
            p = self.attn_pool
            keys, values = p.kv(x[:, self.prefix :]).chunk(2, dim=-1)
            pooled = p.proj(attend(p.q(p.latent.expand(len(x), -1, -1)), keys, values))
            vector = (pooled + p.mlp(p.norm(pooled)))[:, 0]
        else:
            vector = x[:, 0] if self.pool == "token" else x[:, self.prefix :].mean(1)
        vector = self.fc_norm(vector) if hasattr(self, "fc_norm") else vector
        return self.head(vector) if hasattr(self, "head") else vector


class HuggingFaceViT(Box):
    """`pooler`: a ViTModel with its tanh layer; otherwise ViTForImageClassification."""

    def __init__(self, pooler: bool = False):
        patches = Box(projection=conv())
        tower = {
            "embeddings": Box(
                cls_token=tokens(1, 1, D), position_embeddings=tokens(1, CELLS + 1, D), patch_embeddings=patches
            ),
            "encoder": Box(layer=nn.Sequential(SplitBlock(), SplitBlock())),
            "layernorm": norm(1e-12),
        }
        if pooler:
            super().__init__(**tower, pooler=Box(dense=nn.Linear(D, D)))
        else:
            super().__init__(vit=Box(**tower), classifier=nn.Linear(D, CLASSES))
        randomize(self)

    def forward(self, images: Tensor) -> Tensor:
        tower = getattr(self, "vit", self)
        e = tower.embeddings
        x = in_front(cells(e.patch_embeddings.projection, images), e.cls_token) + e.position_embeddings
        vector = tower.layernorm(tower.encoder.layer(x))[:, 0]
        return self.classifier(vector) if hasattr(self, "classifier") else self.pooler.dense(vector).tanh()


class HuggingFaceDinov2(Box):
    """On disk (`q_proj` apart, as in memory since its fifth version, with `memory`)."""

    def __init__(self, registers: int = 0, gated: bool = False, memory: bool = False):
        names = {"attn": "attention"}
        embeddings = Box(
            cls_token=tokens(1, 1, D),
            mask_token=tokens(1, D),
            position_embeddings=tokens(1, CELLS + 1, D),
            patch_embeddings=Box(projection=conv()),
        )
        if registers:
            embeddings.register_tokens = tokens(1, registers, D)
        blocks = (
            Block(
                names, "layer_scale{}.lambda1", attn=split_attention("o_proj") if memory else dinov2_attention(),
                mlp=swiglu_packed("weights_in", "weights_out") if gated else mlp(), norm1=norm(), norm2=norm(),
            )
            for _ in range(2)
        )  # fmt: skip
        super().__init__(embeddings=embeddings, encoder=Box(layer=nn.Sequential(*blocks)), layernorm=norm())
        randomize(self)

    def forward(self, images: Tensor) -> Tensor:
        e = self.embeddings
        x = in_front(cells(e.patch_embeddings.projection, images), e.cls_token) + e.position_embeddings
        if hasattr(e, "register_tokens"):
            x = torch.cat([x[:, :1], e.register_tokens.expand(len(x), -1, -1), x[:, 1:]], dim=1)
        return self.layernorm(self.encoder.layer(x))[:, 0]


def dinov2_attention() -> Call:
    def forward(self: Call, x: Tensor) -> Tensor:
        a = self.attention
        return self.output.dense(attend(a.query(x), a.key(x), a.value(x)))

    inner = Box(query=nn.Linear(D, D), key=nn.Linear(D, D), value=nn.Linear(D, D))
    return Call(forward, attention=inner, output=Box(dense=nn.Linear(D, D)))


class HuggingFaceTower(Box):
    """The image tower of CLIP (class token, norm before, projection after) or of SigLIP (attention pooling)."""

    def __init__(self, clip: bool, act: Callable[[Tensor], Tensor]):
        names, eps = {"attn": "self_attn", "norm1": "layer_norm1", "norm2": "layer_norm2"}, 1e-5 if clip else 1e-6
        parts = {"patch_embedding": conv(not clip), "position_embedding": nn.Embedding(CELLS + clip, D)}
        if clip:
            parts["class_embedding"] = tokens(D)  # type: ignore[assignment]
        blocks = (
            Block(names, attn=split_attention(), mlp=mlp(act=act), norm1=norm(eps), norm2=norm(eps)) for _ in range(2)
        )
        tower = Box(embeddings=Box(**parts), encoder=Box(layers=nn.Sequential(*blocks)), post_layernorm=norm(eps))
        if clip:
            tower.pre_layrnorm = norm(eps)
        else:
            attention = nn.MultiheadAttention(D, HEADS, batch_first=True)
            tower.head = Box(probe=tokens(1, 1, D), attention=attention, layernorm=norm(eps), mlp=mlp(act=act))
        super().__init__(vision_model=tower, text_model=nn.Linear(3, 3), logit_scale=tokens(1))
        if clip:
            self.visual_projection = nn.Linear(D, 6, bias=False)
        self.clip = clip
        randomize(self)

    def forward(self, images: Tensor) -> Tensor:
        v, e = self.vision_model, self.vision_model.embeddings
        x = cells(e.patch_embedding, images)
        x = (in_front(x, e.class_embedding) if self.clip else x) + e.position_embedding.weight
        x = v.post_layernorm(v.encoder.layers(v.pre_layrnorm(x) if self.clip else x))
        if self.clip:
            return self.visual_projection(x[:, 0])
        pooled = v.head.attention(v.head.probe.expand(len(x), -1, -1), x, x)[0]
        return (pooled + v.head.mlp(v.head.layernorm(pooled)))[:, 0]


class Fused(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class OpenClip(Box):
    """open_clip's CLIP with its own vision transformer, and the text tower that is left behind."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.gelu, layer_scale: bool = False):
        names = {"norm1": "ln_1", "norm2": "ln_2"}
        blocks = (
            Block(
                names, "ls_{}.gamma" if layer_scale else None, attn=Fused(D, HEADS, batch_first=True),
                mlp=mlp("c_fc", "c_proj", act), norm1=norm(1e-5), norm2=norm(1e-5),
            )
            for _ in range(2)
        )  # fmt: skip
        visual = Box(
            class_embedding=tokens(D), positional_embedding=tokens(CELLS + 1, D), proj=tokens(D, 6), conv1=conv(False),
            ln_pre=norm(1e-5), transformer=Box(resblocks=nn.Sequential(*blocks)), ln_post=norm(1e-5),
        )  # fmt: skip
        text = Box(resblocks=nn.Sequential(Box(ln_1=norm())))
        super().__init__(visual=visual, transformer=text, token_embedding=nn.Embedding(3, D), logit_scale=tokens(1))
        randomize(self)

    def forward(self, images: Tensor) -> Tensor:
        v = self.visual
        x = in_front(cells(v.conv1, images), v.class_embedding) + v.positional_embedding
        return v.ln_post(v.transformer.resblocks(v.ln_pre(x)))[:, 0] @ v.proj


class Torchvision(Box):
    def __init__(self) -> None:
        names = {"norm1": "ln_1", "norm2": "ln_2", "attn": "self_attention"}
        blocks = {
            f"encoder_layer_{index}": Block(
                names, attn=Fused(D, HEADS, batch_first=True), norm1=norm(), norm2=norm(),
                mlp=nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Dropout(0.0), nn.Linear(H, D), nn.Dropout(0.0)),
            )
            for index in range(2)
        }  # fmt: skip
        encoder = Box(pos_embedding=tokens(1, CELLS + 1, D), layers=Box(**blocks), ln=norm())
        heads = Box(head=nn.Linear(D, CLASSES))
        super().__init__(class_token=tokens(1, 1, D), conv_proj=conv(), encoder=encoder, heads=heads)
        randomize(self)

    def forward(self, images: Tensor) -> Tensor:
        x = in_front(cells(self.conv_proj, images), self.class_token) + self.encoder.pos_embedding
        for block in self.encoder.layers.children():
            x = block(x)
        return self.heads.head(self.encoder.ln(x)[:, 0])
