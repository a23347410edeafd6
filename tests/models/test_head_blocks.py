"""A head that sees several blocks: by hand, at other sizes, in files, in budgets, and what it refuses."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from softmoe import create_model, from_pretrained, save_pretrained
from softmoe.budget import cost
from softmoe.convert import to_timm
from softmoe.inference import prepare
from softmoe.inference.export import export
from softmoe.models import ViTConfig
from softmoe.storage import Preprocessing

TINY = {"width": 16, "depth": 3, "mlp_dim": 32, "heads": 2, "num_classes": 5, "image_size": 32}


def tiny(name="soft_ti8_4e", **options):
    model = create_model(name, **(TINY | {"pool": "class", "head_blocks": (0, 2)} | options))
    nn.init.normal_(model.head.weight)
    return model.eval()


@pytest.mark.parametrize(
    "options", [{}, {"pool": "mean"}, {"pool": "attention"}, {"registers": 2}, {"pool_norm": True}]
)
def test_the_head_by_hand(options):
    """The head gets the pooled vector, then of each block the class token, if any, and the mean of the cells."""
    model = tiny(**options)
    images = torch.randn(2, 3, 32, 32)
    last, blocks = model.forward_intermediates(images, [0, 2], return_prefix_tokens=True, output_fmt="NLC")
    parts = [model.forward_head(last, pre_logits=True)]
    for found in blocks:
        cells, prefix = found if isinstance(found, tuple) else (found, None)
        parts += [F.layer_norm(prefix[:, 0], (16,), eps=1e-6)] if model.config.pool == "class" else []
        parts += [F.layer_norm(cells, (16,), eps=1e-6).mean(1)]
    vector = torch.cat(parts, 1)
    assert vector.shape == (2, model.config.head_width)
    torch.testing.assert_close(model.forward_vector(images), vector)
    torch.testing.assert_close(model(images), model.head(vector))
    assert model(torch.randn(1, 3, 24, 72)).shape == (1, 5)
    assert model.get_classifier().in_features == model.config.head_width
    model.reset_classifier(3)
    assert model(images).shape == (2, 3)


def test_saved_prepared_exported_counted(tmp_path):
    """The wide head is kept by saved folders, prepared models, exported files and the count of parameters."""
    model = tiny()
    save_pretrained(model, tmp_path / "model")
    assert ViTConfig.from_dict(json.loads(json.dumps(model.config.to_dict()))) == model.config
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(from_pretrained(tmp_path / "model").eval()(images), model(images))
    torch.testing.assert_close(prepare(model)(images), model(images), rtol=1e-4, atol=1e-4)
    made = export(model, tmp_path / "m.pt2", "torch-export", preprocessing=Preprocessing((32, 32)))
    assert max(made.differences.values()) < 1e-4
    assert cost(model.config).params == sum(p.numel() for p in model.parameters())


def test_mistakes():
    """Blocks that are not there, twice or out of order are refused, and so is a head without its blocks."""
    for blocks in ((3,), (-1,), (1, 1), (2, 0)):
        with pytest.raises(ValueError, match=r"head_blocks are blocks from 0 to 2 in rising order, got \["):
            tiny(head_blocks=blocks)
    model = tiny("vit_ti8")
    with pytest.raises(ValueError, match="the head of this model sees several blocks"):
        model.forward_head(model.forward_features(torch.randn(1, 3, 32, 32)))
    with pytest.raises(ValueError, match="no head on several blocks"):
        to_timm(model)
