"""The parts of which the stand-ins for other libraries' vision transformers are made (towers.py)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, H, HEADS, PATCH, CELLS, CLASSES = 16, 24, 2, 4, 9, 5


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Box(nn.Module):
    """A module that only holds others by name."""

    def __init__(self, **parts: nn.Module | nn.Parameter):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Call(Box):
    """A box whose forward pass is the given function of it and its input."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | nn.Parameter):
        super().__init__(**parts)
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def tokens(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def norm(eps: float = 1e-6) -> nn.LayerNorm:
    return nn.LayerNorm(D, eps=eps)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (query, key, value)]
    weights = (heads[0] @ heads[1].transpose(-1, -2) / (D // HEADS) ** 0.5).softmax(-1)
    return (weights @ heads[2]).transpose(1, 2).flatten(2)


def packed_attention() -> Call:
    """As timm's."""
    return Call(
        lambda self, x: self.proj(attend(*self.qkv(x).chunk(3, dim=-1))),
        qkv=nn.Linear(D, 3 * D),
        proj=nn.Linear(D, D),
    )


def split_attention(out: str = "out_proj") -> Call:
    parts = {name: nn.Linear(D, D) for name in ("q_proj", "k_proj", "v_proj", out)}
    return Call(lambda self, x: getattr(self, out)(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x))), **parts)


def mlp(first: str = "fc1", second: str = "fc2", act: Callable[[Tensor], Tensor] = F.gelu) -> Call:
    parts = {first: nn.Linear(D, H), second: nn.Linear(H, D)}
    return Call(lambda self, x: getattr(self, second)(act(getattr(self, first)(x))), **parts)


def swiglu_packed(first: str = "w12", second: str = "w3") -> Call:
    """As DINOv2's giant: silu(first half) times second half."""

    def forward(self: Call, x: Tensor) -> Tensor:
        gate, up = getattr(self, first)(x).chunk(2, dim=-1)
        return getattr(self, second)(F.silu(gate) * up)

    return Call(forward, **{first: nn.Linear(D, 2 * H), second: nn.Linear(H, D)})


def swiglu() -> Call:
    """As Llama's and DINOv3's."""
    return Call(
        lambda self, x: self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)),
        gate_proj=nn.Linear(D, H),
        up_proj=nn.Linear(D, H),
        down_proj=nn.Linear(H, D),
    )


class Block(Box):
    """x + scale1 attention(norm1(x)), then the MLP; the names are those of the library."""

    def __init__(self, names: dict[str, str], scale: str | None = None, **parts: nn.Module):
        super().__init__(**{names.get(name, name): part for name, part in parts.items()})
        self.names, self.scale = names, scale
        for number in (1, 2) if scale else ():
            name, leaf = scale.format(number).split(".")  # type: ignore[union-attr]
            setattr(self, name, Box(**{leaf: tokens(D)}))

    def part(self, name: str) -> nn.Module:
        return getattr(self, self.names.get(name, name))

    def scaled(self, number: int, x: Tensor) -> Tensor:
        return x if self.scale is None else self.get_parameter(self.scale.format(number)) * x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scaled(1, self.part("attn")(self.part("norm1")(x)))
        return x + self.scaled(2, self.part("mlp")(self.part("norm2")(x)))


class SplitBlock(Box):
    """Hugging Face's ViT before its fifth version: the MLP is in two modules, and the second adds the residual."""

    def __init__(self) -> None:
        attention = Box(query=nn.Linear(D, D), key=nn.Linear(D, D), value=nn.Linear(D, D))
        super().__init__(
            attention=Box(attention=attention, output=Box(dense=nn.Linear(D, D))),
            intermediate=Call(lambda self, x: F.gelu(self.dense(x)), dense=nn.Linear(D, H)),
            output=Call(lambda self, x, residual: self.dense(x) + residual, dense=nn.Linear(H, D)),
            layernorm_before=norm(1e-12),
            layernorm_after=norm(1e-12),
        )

    def forward(self, x: Tensor) -> Tensor:
        a, normed = self.attention.attention, self.layernorm_before(x)
        mixed = self.attention.output.dense(attend(a.query(normed), a.key(normed), a.value(normed)))
        x = x + mixed
        return self.output(self.intermediate(self.layernorm_after(x)), x)


def randomize(model: nn.Module) -> nn.Module:
    """Nothing zero, nothing one."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def cells(patches: nn.Module, images: Tensor) -> Tensor:
    return patches(images).flatten(2).transpose(1, 2)


def in_front(x: Tensor, *prefix: Tensor) -> Tensor:
    return torch.cat([*(token.reshape(1, -1, D).expand(len(x), -1, -1) for token in prefix), x], dim=1)


def conv(bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(3, D, PATCH, PATCH, bias=bias)
