"""timm's habits on our models, and maps for segmentation heads."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from two_towers import two_towers

from softmoe.models import VisionTransformer, create_model

TINY = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 3, "mlp_dim": 16, "heads": 2, "num_experts": 4}


def model(**options) -> VisionTransformer:
    return create_model("soft_ti16_4e", **TINY | {"num_classes": 5} | options)


def test_names():
    """Numbers that other people's code asks a model for."""
    made = model()
    assert (made.num_classes, made.embed_dim, made.num_features, made.head_hidden_size) == (5, 16, 16, 16)
    narrow = model(representation_size=24, num_classes=0)
    assert (narrow.num_features, narrow.head_hidden_size) == (16, 24)
    assert narrow(torch.zeros(1, made.in_chans, 32, 32)).shape == (1, 24)
    assert model(num_classes=None).num_classes == model(num_classes=0).num_classes == 0
    assert model(img_size=48, pretrained=False).config.image_size == 48
    assert made.get_classifier() is made.head


def test_a_new_head():
    """reset_classifier puts a fresh head on, or takes it off; the configuration follows, so that it can be saved."""
    made, images = model(), torch.randn(2, 3, 32, 32)
    made.reset_classifier(7)
    assert made(images).shape == (2, 7)
    assert made.config.num_classes == made.num_classes == 7
    made.double().eval().reset_classifier(7)
    assert made(images.double()).dtype == torch.float64
    assert not made.head.training
    made.float().reset_classifier(0, "avg")
    assert made(images).shape == (2, 16)
    with pytest.raises(ValueError, match="the pool of a model stays 'mean', so it cannot become 'token'; forward_fe"):
        made.reset_classifier(3, "token")


@pytest.mark.parametrize("pool", ["mean", "class"])
def test_intermediate_maps(pool: str):
    """The last of all blocks, normed, is forward_features; maps hold the same numbers as tokens, cell by cell."""
    made, images = model(pool=pool).eval(), torch.randn(2, 3, 24, 40)
    tokens, maps = made.forward_intermediates(images, norm=True)
    torch.testing.assert_close(tokens, made.forward_features(images))
    assert [m.shape for m in maps] == [(2, 16, 3, 5)] * 3
    torch.testing.assert_close(maps[-1].flatten(2).transpose(1, 2), tokens[:, int(pool == "class") :])
    (last,) = made.get_intermediate_layers(images, norm=True)
    torch.testing.assert_close(last, tokens[:, int(pool == "class") :])
    both = made.get_intermediate_layers(images, [0, -1], reshape=True, norm=True, return_prefix_tokens=True)
    if pool == "class":
        (first, prefix), (final, _) = both
        assert prefix.shape == (2, 1, 16)
    else:
        first, final = both  # as in timm, tokens that are not there are not returned
    torch.testing.assert_close(final, maps[-1])
    torch.testing.assert_close(first, maps[0])
    early = made.forward_intermediates(images, [0], stop_early=True, norm=True, intermediates_only=True)
    torch.testing.assert_close(early[0], maps[0])


@pytest.mark.parametrize(("indices", "words"), [(4, "3 blocks"), ([3], "blocks 0 to 2, not"), ([], "not none")])
def test_blocks_that_are_not_there(indices, words):
    """One sentence."""
    with pytest.raises(ValueError, match=words):
        model().forward_intermediates(torch.randn(1, 3, 32, 32), indices)


def test_a_small_segmentation_head_learns():
    """Maps of two blocks, a 1 x 1 convolution and an upsampling tell the left half of an image from the right, with
    gradients in the backbone."""
    torch.manual_seed(0)
    backbone, head = model(num_classes=None), nn.Conv2d(32, 2, 1)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=3e-3)
    images = torch.rand(8, 3, 32, 32)
    images[:, :, :, :16] -= 1.0
    target = torch.zeros(8, 32, 32, dtype=torch.int64)
    target[:, :, 16:] = 1

    def logits() -> torch.Tensor:
        maps = backbone.forward_intermediates(images, [1, 2], norm=True, intermediates_only=True)
        return F.interpolate(head(torch.cat(maps, 1)), scale_factor=8)

    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(logits(), target).backward()
        optimizer.step()
    assert (logits().argmax(1) == target).float().mean() > 0.95
    assert all(p.grad is not None for p in backbone.encoder.blocks.parameters())


def test_decay_and_layers():
    """Slot vectors, positions and the experts' biases are not decayed; each parameter but the head's has a layer."""
    made = model(pool="class")
    free = made.no_weight_decay()
    names = dict(made.named_parameters())
    assert free <= names.keys()
    assert {"class_token", "encoder.blocks.2.mlp.router.phi", "encoder.blocks.2.mlp.experts.b1"} <= free
    assert not any(name.endswith((".w1", ".w2", "qkv.weight")) for name in free)
    patterns = made.group_matcher()
    found = [patterns["stem"], *(pattern for pattern, _ in patterns["blocks"])]
    left = [name for name in names if not any(re.search(pattern, name) for pattern in found)]
    assert set(left) == {"head.weight", "head.bias"}


def test_decay_of_two_towers():
    """Two towers leave out of weight decay what each tower leaves out, and no matrices."""
    towers = two_towers()
    free = towers.no_weight_decay()
    assert {"image.positions.table", "text.positions.table"} <= free
    assert {name.removeprefix("image.") for name in free if name.startswith("image.")} == towers.image.no_weight_decay()
    assert not any(name.endswith((".w1", ".w2", ".weight")) for name in free)


def test_gradient_checkpointing():
    """set_grad_checkpointing gives the same gradients."""
    made, images = model(), torch.randn(2, 3, 32, 32)
    made(images).sum().backward()
    plain = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    made.set_grad_checkpointing()
    made(images).sum().backward()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])


def test_names_of_options():
    """create_model takes timm's in_chans, drop_rate, proj_drop_rate, attn_drop_rate and drop_path_rate."""
    config = model(in_chans=3, drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3, drop_path_rate=0.4).config
    assert (config.head_dropout, config.dropout, config.attention_dropout, config.drop_path) == (0.1, 0.2, 0.3, 0.4)
    with pytest.raises(ValueError, match="images have 3 channels here, not 1"):
        model(in_chans=1)
    with pytest.raises(ValueError, match=r"drop_path must be in \[0, 1\), got 1.0"):
        model(drop_path=1.0)


def test_head_dropout():
    """timm's drop_rate is of the head alone: tokens stay as they are, and the vector loses numbers in training only."""
    made, images = model(drop_rate=0.5).train(), torch.randn(2, 3, 32, 32)
    nn.init.ones_(made.head.weight)
    torch.testing.assert_close(made.forward_features(images), made.forward_features(images))
    assert not torch.allclose(made(images), made(images))
    tokens = made.forward_features(images)
    assert not torch.allclose(made.forward_head(tokens), made.forward_head(tokens))
    made.eval()
    torch.testing.assert_close(made(images), made.forward_head(tokens))


def test_drop_path():
    """Whole branches of whole images are left out, more often in later blocks, and the mean stays; in evaluation none
    is."""
    made, plain = model(drop_path=0.5), model()
    plain.load_state_dict(made.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(made.eval()(images), plain.eval()(images))
    assert [block.drop_path.rate for block in made.encoder.blocks] == [0.0, 0.25, 0.5]
    torch.manual_seed(0)
    kept = made.encoder.blocks[2].drop_path.train()(torch.ones(4000, 3, 2))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert (kept.std((1, 2)) == 0).all()
    assert kept.mean() == pytest.approx(1.0, abs=0.1)
