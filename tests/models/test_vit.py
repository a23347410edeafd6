"""The vision transformer as a whole: its parts in order, its options, its start."""

import copy
import math

import pytest
import torch
from torch import nn

from softmoe import create_model
from softmoe.models import VisionTransformer
from softmoe.models.transformer import MLP
from softmoe.moe import Experts, MoE
from softmoe.moe.config import ROUTERS

TINY = {"width": 16, "depth": 2, "mlp_dim": 32, "heads": 2, "num_classes": 5, "image_size": 48}


def tiny(name: str = "soft_ti16_4e", **options) -> VisionTransformer:
    """A small model whose head does not start at zero, so that outputs mean something."""
    model = create_model(name, **(TINY | options))
    if isinstance(model.head, nn.Linear):
        nn.init.normal_(model.head.weight)
    return model


@pytest.mark.parametrize("pool", ["mean", "class", "attention"])
@pytest.mark.parametrize("positions", ["learned", "sincos", "none"])
def test_every_pool_with_every_kind_of_positions(pool, positions):
    """Shapes of tokens, vector and logits; gradients for all parameters; other, non-square sizes."""
    model = tiny(pool=pool, positions=positions)
    images = torch.randn(2, 3, 48, 48)
    tokens = model.forward_features(images)
    assert tokens.shape == (2, 9 + (pool == "class"), 16) == (2, model.config.tokens, 16)
    assert model.forward_head(tokens, pre_logits=True).shape == (2, 16)
    logits = model(images)
    torch.testing.assert_close(model.forward_head(tokens), logits)
    logits.square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert model(torch.randn(2, 3, 32, 80)).shape == (2, 5)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router(router):
    """Each router trains inside the model."""
    model = tiny(f"{router}_ti16_4e").train()
    model(torch.randn(2, 3, 48, 48)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_the_forward_pass_by_hand():
    """Patches, positions, pre-norm blocks, last norm, mean, head: the plain computation of the paper's model."""
    model = tiny("vit_ti16").double()
    images = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    proj = model.embed.proj
    tokens = []
    for row in range(3):
        for column in range(3):
            patch = images[:, :, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            tokens.append(torch.einsum("bchw,dchw->bd", patch, proj.weight) + proj.bias)
    x = torch.stack(tokens, dim=1) + model.positions.table
    for block in model.encoder.blocks:
        a = block.attention
        normed = nn.functional.layer_norm(x, (16,), block.norm1.weight, block.norm1.bias, eps=1e-6)
        query, key, value = (normed @ a.qkv.weight.T + a.qkv.bias).chunk(3, dim=-1)
        heads = []
        for h in range(2):
            q, k, v = (t[..., 8 * h : 8 * h + 8] for t in (query, key, value))
            q = nn.functional.layer_norm(q, (8,), a.query_norm.weight, eps=1e-6)
            k = nn.functional.layer_norm(k, (8,), a.key_norm.weight, eps=1e-6)
            heads.append((q @ k.transpose(1, 2) / math.sqrt(8)).softmax(-1) @ v)
        x = x + torch.cat(heads, dim=-1) @ a.out.weight.T + a.out.bias
        normed = nn.functional.layer_norm(x, (16,), block.norm2.weight, block.norm2.bias, eps=1e-6)
        hidden = nn.functional.gelu(normed @ block.mlp.fc1.weight.T + block.mlp.fc1.bias, approximate="tanh")
        x = x + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    last = model.encoder.norm
    x = nn.functional.layer_norm(x, (16,), last.weight, last.bias, eps=1e-6)
    expected = x.mean(1) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(images), expected)


def test_the_start():
    """Zero head with bias -ln(classes), zero biases, zero class token, normal positions of 0.02, xavier matrices."""
    model = create_model("vit_ti16", num_classes=1000, pool="class", depth=1)
    assert model.head.weight.abs().max() == 0
    torch.testing.assert_close(model.head.bias, torch.full((1000,), -math.log(1000)))
    probability = model(torch.randn(1, 3, 224, 224)).sigmoid()
    torch.testing.assert_close(probability, torch.full_like(probability, 1 / 1001))
    assert model.class_token.abs().max() == 0
    assert model.positions.table.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.embed.proj.bias.abs().max() == 0
    assert model.embed.proj.weight.std().item() == pytest.approx((3 * 16**2) ** -0.5, rel=0.02)
    attention, mlp = model.encoder.blocks[0].attention, model.encoder.blocks[0].mlp
    for part in attention.qkv.weight.chunk(3):  # q, k and v each with the fans of a square matrix
        assert part.std().item() == pytest.approx((1 / 192) ** 0.5, rel=0.02)
    assert attention.out.weight.std().item() == pytest.approx((1 / 192) ** 0.5, rel=0.02)
    assert attention.qkv.bias.abs().max() == 0
    assert mlp.fc1.weight.std().item() == pytest.approx((2 / (192 + 768)) ** 0.5, rel=0.02)
    assert 0 < mlp.fc1.bias.abs().max() < 1e-5


def test_norms():
    """LayerNorm epsilon 1e-6 everywhere; the norms of queries and keys have a scale and no bias."""
    model = tiny(pool="attention")
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    assert len(norms) == 2 * 4 + 1 + 3
    for name, norm in norms.items():
        assert norm.eps == 1e-6
        assert (norm.bias is None) == name.endswith(("query_norm", "key_norm"))
        assert norm.normalized_shape == ((8,) if norm.bias is None else (16,))


def test_no_head_and_pre_logits():
    """Without classes the model gives features; a representation size puts a tanh layer before the head."""
    bare = tiny(num_classes=None)
    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(bare(images), bare.forward_features(images).mean(1))
    model = tiny(representation_size=7)
    vector = model.forward_head(model.forward_features(images), pre_logits=True)
    assert vector.shape == (2, 7)
    assert vector.abs().max() <= 1
    torch.testing.assert_close(model(images), model.head(vector))


@pytest.mark.parametrize("name", ["soft_ti16_4e", "tokens_choice_ti16_4e"])
def test_gradient_checkpointing(name):
    """Blocks computed again in the backward pass give the same gradients to the bit, dropout and noise included."""
    model = tiny(name, dropout=0.1).train()
    images = torch.randn(2, 3, 48, 48)
    gradients = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        torch.manual_seed(1)
        model(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


def test_gradient_checkpointing_is_only_for_training():
    """In evaluation nothing is computed twice; the output is the same."""
    model = tiny().eval()
    images = torch.randn(1, 3, 48, 48)
    expected = model(images)
    model.set_grad_checkpointing()
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize("identical", [False, True])
def test_identical_init_reaches_every_layer(identical):
    """Experts of a layer are copies or not; layers differ from each other either way."""
    model = tiny(depth=4, identical_init=identical)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        assert torch.equal(layer.experts.w1[0], layer.experts.w1[1]) == identical
    assert not torch.equal(layers[0].experts.w1, layers[1].experts.w1)


def test_state_copies_and_casts():
    """deepcopy, state dict round trip, float64 and half; fixed tables are not saved."""
    model = tiny(positions="sincos").eval()
    images = torch.randn(2, 3, 48, 48)
    logits = model(images)
    assert torch.equal(copy.deepcopy(model)(images), logits)
    other = tiny(positions="sincos").eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images), logits)
    assert "positions.table" not in model.state_dict()
    torch.testing.assert_close(copy.deepcopy(model).double()(images.double()).float(), logits, rtol=1e-3, atol=1e-4)
    half = copy.deepcopy(model).half()(images.half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), logits, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "shape", [(3, 48, 48), (2, 1, 48, 48), (2, 48, 48, 3), (2, 3, 48), (2, 3, 8, 48), (2, 3, 48, 15)]
)
def test_bad_images(shape):
    """Wrong rank, channels or a size below one patch: expected and given shapes are said."""
    with pytest.raises(ValueError, match=r"expected images of shape|smaller than one patch of 16 pixels"):
        tiny()(torch.randn(shape))


def test_bytes_are_no_images():
    """Pixels as they are in files are refused with the numbers that are expected."""
    with pytest.raises(ValueError, match=r"real numbers from -1 to 1, got torch.uint8"):
        tiny()(torch.zeros(1, 3, 48, 48, dtype=torch.uint8))


def test_the_activation_reaches_every_mlp():
    """One setting for dense blocks, experts and the attention pool; an unknown one is refused by name."""
    model = tiny(activation="gelu", pool="attention")
    assert [module.activation for module in model.modules() if isinstance(module, MLP | Experts)] == ["gelu"] * 3
    with pytest.raises(ValueError, match="activation must be one of"):
        tiny(activation="tanh")
