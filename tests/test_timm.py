"""Our models in timm's registry. timm is not a dependency, so its registration is stood in for where it is absent."""

import importlib
import sys
import types

import pytest
import torch

from softmoe import list_models


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


def test_models_are_made_by_timms_convention(registry):
    """img_size, zero classes for features, and timm's bookkeeping left aside."""
    options = {"pretrained": False, "pretrained_cfg": None, "pretrained_cfg_overlay": None, "cache_dir": None}
    small = {"width": 16, "depth": 2, "mlp_dim": 16, "heads": 2, "img_size": 32}
    model = registry["softmoe_soft_s16_32e"](num_classes=3, **small, **options)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    assert model.pretrained_cfg["input_size"] == (3, 32, 32)
    assert registry["softmoe_vit_s16"](num_classes=0, **small)(torch.randn(1, 3, 32, 32)).shape == (1, 16)
    with pytest.raises(ValueError, match="no weights to download for vit_s16"):
        registry["softmoe_vit_s16"](pretrained=True)


def test_without_timm_the_extra_is_named(monkeypatch):
    """One sentence, when the module is imported."""
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.models", None)
    monkeypatch.delitem(sys.modules, "softmoe.timm", raising=False)
    with pytest.raises(ImportError, match=r"softmoe-vit\[timm\]"):
        importlib.import_module("softmoe.timm")
