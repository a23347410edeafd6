"""Merged tokens (PatchMerger): by plain loops, in a model, at other image sizes, in files, and on the command line."""

import json

import oracle
import pytest
import torch
from torch import nn

from softmoe import create_model, from_pretrained, save_pretrained
from softmoe.cli.train import parse_train
from softmoe.inference.export import export
from softmoe.models import ViTConfig
from softmoe.models.transformer import PatchMerger
from softmoe.storage import Preprocessing

TINY = {"width": 16, "depth": 3, "mlp_dim": 32, "heads": 2, "num_classes": 5, "image_size": 32}


def tiny(**options):
    """A small model of 16 tokens, 5 from its second block on, whose head does not start at zero."""
    model = create_model("vit_ti8", **(TINY | {"merge": (1, 5)} | options))
    nn.init.normal_(model.head.weight)
    return model.eval()


@pytest.mark.parametrize("prefix", [0, 2])
def test_the_merger_by_loops(prefix):
    """Each merged token is a softmax-weighted mean of the normalized tokens; tokens of no cell pass unchanged."""
    merger = PatchMerger(6, 3, prefix).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    expected = torch.from_numpy(oracle.merge(merger.norm(x).detach().numpy(), merger.queries.detach().numpy(), prefix))
    torch.testing.assert_close(merger(x), torch.cat([x[:, :prefix], expected], dim=1))


@pytest.mark.parametrize(
    "options",
    [{"pool": "class"}, {"pool": "attention"}, {"pool": "concat"}, {"registers": 2}, {"merge": (2, 1)}],
)
def test_a_model_with_merged_tokens(options):
    """Only the merged tokens leave the model, with class token and registers; every parameter learns; checkpoints in
    the backward pass change nothing; any image size works."""
    model = tiny(**options)
    images = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(images)
    assert tokens.shape[1] == model.config.tokens_by_block[-1] == model.config.prefix + model.config.merge[1]
    model(images).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    wanted = model.encoder.blocks[0].norm1.weight.grad.clone()
    model.zero_grad()
    model.train().set_grad_checkpointing()
    model(images).square().sum().backward()
    torch.testing.assert_close(model.encoder.blocks[0].norm1.weight.grad, wanted)
    assert model(torch.randn(1, 3, 24, 72)).shape == (1, 5)


def test_a_head_with_weights_for_each_token():
    """With pool concat the logits are a sum over tokens, each with weights of its own; registers have none."""
    model, images = tiny(pool="concat", registers=2), torch.randn(3, 3, 40, 24)
    tokens = model.forward_features(images)[:, 2:]
    weights = model.head.weight.view(5, 5, 16)
    torch.testing.assert_close(model(images), torch.einsum("bmd,cmd->bc", tokens, weights) + model.head.bias)
    model.reset_classifier(3)
    assert model(images).shape == (3, 3)
    assert model.head_hidden_size == model.forward_vector(images).shape[1] == 80


@pytest.mark.parametrize("pool", ["class", "concat"])
def test_saved_and_exported(pool, tmp_path):
    """A saved folder keeps the merger, an exported file gives the model's outputs at any batch size."""
    model = tiny(pool=pool)
    save_pretrained(model, tmp_path / "model")
    assert ViTConfig.from_dict(json.loads(json.dumps(model.config.to_dict()))) == model.config
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(from_pretrained(tmp_path / "model").eval()(images), model(images))
    made = export(model, tmp_path / "m.pt2", "torch-export", preprocessing=Preprocessing((32, 32)))
    torch.testing.assert_close(torch.export.load(made.path).module()(images), model(images), rtol=1e-4, atol=1e-5)


def test_maps_end_where_tokens_are_merged():
    """Blocks before the merger give maps, those from it on tokens only; its queries are not decayed."""
    model, images = tiny(), torch.randn(1, 3, 32, 32)
    assert model.forward_intermediates(images, [0], intermediates_only=True)[0].shape == (1, 16, 4, 4)
    assert model.forward_intermediates(images, [2], output_fmt="NLC")[1][0].shape == (1, 5, 16)
    with pytest.raises(ValueError, match="after block 1 tokens are no longer cells of the image, so there are no maps"):
        model.forward_intermediates(images)
    assert "encoder.blocks.1.merger.queries" in model.no_weight_decay()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("soft_ti8_4e", {"merge": (1, 5)}, "merge is for models without experts"),
        ("vit_ti8", {"merge": (3, 5)}, "merge is a block from 0 to 2 and the tokens after it, 1 at least, got 3, 5"),
        ("vit_ti8", {"merge": (1, 0)}, "got 1, 0"),
        ("vit_ti8", {"pool": "concat"}, "pool concat needs a number of tokens that no image size changes"),
        ("vit_ti8", {"merge": (1, 5), "pool": "concat", "pool_norm": True}, "leave out pool_norm"),
    ],
)
def test_mistakes(name, options, message):
    """Experts beside merged tokens, a block that is not there, no token at all, and a head on each cell are refused."""
    with pytest.raises(ValueError, match=message):
        create_model(name, **TINY, **options)


def test_on_the_command_line():
    """A recipe's dense twin gets merged tokens by one option."""
    merged = ["--model.router", "dense", "--model.merge", "0", "4"]
    config, _ = parse_train("quickstart", merged)
    assert config.model.resolve(10, 32).tokens_by_block == (16, 4, 4, 4)
    config, _ = parse_train("quickstart", [*merged, "--model.pool", "concat"])
    assert config.model.resolve(10, 32).head_width == 4 * config.model.width
