"""Our models in timm's registry. timm is not a dependency, so its registration is stood in for where it is absent."""

import importlib
import importlib.util
import itertools
import sys
import types
import warnings

import pytest
import torch
from others import real_timm

from softmoe import from_pretrained, list_models, save_pretrained
from softmoe.convert import from_timm

SMALL = {"width": 16, "depth": 3, "mlp_dim": 16, "heads": 2, "img_size": 32}


@pytest.fixture
def registry(monkeypatch):
    """What timm's decorator keeps: name -> function, looked up in the function's own module."""
    entries = {}

    def register_model(function):
        assert function.__module__ in sys.modules
        entries[function.__name__] = function
        return function

    timm, models = types.ModuleType("timm"), types.ModuleType("timm.models")
    models.register_model = register_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.models", models)
    monkeypatch.delitem(sys.modules, "softmoe.timm", raising=False)
    importlib.import_module("softmoe.timm")
    yield entries
    sys.modules.pop("softmoe.timm", None)


def test_all_names_are_there(registry):
    """Each of ours, with our prefix."""
    assert set(registry) == {f"softmoe_{name}" for name in list_models()}


def test_without_timm_the_extra_is_named(monkeypatch):
    """One sentence, when the module is imported."""
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.models", None)
    monkeypatch.delitem(sys.modules, "softmoe.timm", raising=False)
    with pytest.raises(ImportError, match=r"softmoe-vit\[timm\]"):
        importlib.import_module("softmoe.timm")


@pytest.fixture
def real(monkeypatch):
    """timm itself with our models in it, if it is installed."""
    timm = real_timm()
    monkeypatch.delitem(sys.modules, "softmoe.timm", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("timm.data", "timm.optim", "softmoe.timm"):
            importlib.import_module(name)
        yield timm
    sys.modules.pop("softmoe.timm", None)


def test_models_are_made_by_timms_convention(real):
    """img_size, zero classes for features, device and dtype, and what timm keeps about every model of its own."""
    small = {name: value for name, value in SMALL.items() if name != "img_size"}
    model = real.create_model("softmoe_soft_s16_32e", num_classes=3, img_size=(32, 48), dtype=torch.float64, **small)
    assert model(torch.randn(1, 3, 32, 48, dtype=torch.float64)).shape == (1, 3)
    assert model.pretrained_cfg is model.default_cfg
    assert model.pretrained_cfg["input_size"] == (3, 32, 48)
    assert model.pretrained_cfg["architecture"] == "softmoe_soft_s16_32e"
    names = model.state_dict().keys()
    assert {f"{model.pretrained_cfg[part]}.weight" for part in ("classifier", "first_conv")} <= names
    assert real.get_pretrained_cfg("softmoe_soft_s16_32e").input_size == (3, 224, 224)
    assert real.create_model("softmoe_vit_s16", num_classes=0, **SMALL)(torch.randn(1, 3, 32, 32)).shape == (1, 16)
    assert all(p.is_meta for p in real.create_model("softmoe_vit_s16", device="meta").parameters())
    with pytest.raises(ValueError, match=r"no weights to download for vit_s16.*--checkpoint"):
        real.create_model("softmoe_vit_s16", pretrained=True)


@pytest.mark.parametrize("prefix", [{}, {"class_token": True, "reg_tokens": 2, "global_pool": "token"}])
def test_intermediates_are_timms(real, prefix):
    """With the weights of a model of timm's, every argument of forward_intermediates gives what it gives there."""
    arguments = {"class_token": False, "global_pool": "avg", "fc_norm": False} | prefix
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2, "num_classes": 3}
    theirs = real.models.VisionTransformer(**shape, **arguments, no_embed_class=True).double().eval()
    pixels = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    ours = from_timm(theirs.state_dict(), heads=2, image_size=16, pool="class" if prefix else "mean", **pixels).eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images))
    for values in itertools.product((None, 2, [0, -2]), *[(False, True)] * 3, ("NCHW", "NLC"), (False, True)):
        torch.testing.assert_close(
            ours.forward_intermediates(images, *values), theirs.forward_intermediates(images, *values)
        )
    for values in itertools.product((1, [1, 3]), *[(False, True)] * 3):
        found = ours.get_intermediate_layers(images, *values)
        torch.testing.assert_close(list(found), theirs.get_intermediate_layers(images, *values))
    for model in (ours, theirs):
        model.reset_classifier(0)
        assert model(images).shape == (2, model.head_hidden_size) == (2, model.num_features)
    torch.testing.assert_close(ours(images), theirs(images))


def test_with_timm_itself(real):
    """What timm's train.py and validate.py pass and ask for: arguments, transforms, groups by layer, a step, maps."""
    name = "softmoe_soft_s16_4e" if "softmoe_soft_s16_4e" in real.list_models() else "softmoe_soft_s16_32e"
    arguments = {"in_chans": 3, "drop_rate": 0.1, "drop_path_rate": 0.1, "global_pool": "avg", "scriptable": False}
    model = real.create_model(name, pretrained=False, num_classes=7, num_experts=4, **arguments, **SMALL)
    assert (model.num_classes, model.config.pool) == (7, "mean")
    assert (model.config.head_dropout, model.config.drop_path, model.config.dropout) == (0.1, 0.1, 0.0)
    config = real.data.resolve_data_config({}, model=model)
    assert config["input_size"] == (3, 32, 32)
    assert config["mean"] == config["std"] == (0.5, 0.5, 0.5)
    optimizer = real.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    scale = {name: of[id(p)]["lr_scale"] for name, p in model.named_parameters()}
    decay = {name: of[id(p)]["weight_decay"] for name, p in model.named_parameters()}
    assert scale["head.weight"] == 1.0
    assert scale["embed.proj.weight"] < scale["encoder.blocks.0.attention.qkv.weight"] < scale["head.weight"]
    assert decay["encoder.blocks.2.mlp.router.phi"] == decay["positions.table"] == 0.0
    assert decay["encoder.blocks.2.mlp.experts.w1"] == 0.05
    before = model.head.weight.detach().clone()
    torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    optimizer.step()
    assert not torch.equal(before, model.head.weight)
    maps = real.create_model(name, features_only=True, out_indices=(0, 2), num_experts=4, **SMALL)
    assert [found.shape for found in maps(torch.randn(1, 3, 32, 32))] == [(1, 16, 2, 2)] * 2
    assert maps.feature_info.channels() == [16, 16]
    assert len(real.create_model(name, features_only=True, num_experts=4, **SMALL)(torch.randn(1, 3, 32, 32))) == 3


def test_weights_go_from_timms_script_to_our_commands_and_back(real, tmp_path):
    """A checkpoint of train.py becomes a saved model of ours, and a saved model's file starts a run of train.py."""
    name, options = "softmoe_soft_s16_32e", {"num_experts": 4, "num_classes": 3} | SMALL
    utils = importlib.import_module("timm.utils")
    trained = real.create_model(name, **options).eval()
    optimizer = real.optim.create_optimizer_v2(trained, opt="sgd", lr=0.1)
    saver = utils.CheckpointSaver(trained, optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.0)
    loaded = real.create_model(name, checkpoint_path=str(tmp_path / "model_best.pth.tar"), **options)
    save_pretrained(loaded, tmp_path / "ours")
    again = real.create_model(name, checkpoint_path=str(tmp_path / "ours" / "model.safetensors"), **options)
    images = torch.randn(2, 3, 32, 32)
    for model in (from_pretrained(tmp_path / "ours"), again):
        torch.testing.assert_close(model.eval()(images), trained(images))
