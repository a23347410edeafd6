"""A model saved as what differs from its base."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from softmoe.convert import from_pretrained
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.storage import open_saved, save_adapters, save_pretrained

BASE = ViTConfig(image_size=16, patch_size=4, width=8, depth=2, mlp_dim=12, heads=2, num_classes=3)
BESIDE = replace(
    BASE, image_size=24, num_classes=5, moe=MoEConfig.of("soft", 3, expert_dim=2, keep_mlp=True, blocks=(1,))
)


@pytest.fixture
def base(tmp_path):
    save_pretrained(VisionTransformer(BASE), tmp_path / "base")
    return tmp_path / "base"


def adapted(base, config=BESIDE):
    """The base with experts and a head that learned something."""
    from softmoe.convert.foreign import starting_weights

    model = VisionTransformer(config).eval()
    model.load_state_dict(starting_weights(model, base))
    for name, parameter in model.named_parameters():
        if ".experts." in name or name.startswith("head."):
            nn.init.normal_(parameter)
    return model


def test_both_together_are_the_model(base, tmp_path):
    """The folder holds the head and what stands beside the MLPs, no more; with the base it is the model bit for bit."""
    model = adapted(base)
    saved = save_adapters(model, tmp_path / "adapters", base, classes="abcde")
    images = torch.randn(2, 3, 24, 24)
    again = from_pretrained(tmp_path / "adapters")
    assert torch.equal(again(images), model(images))
    from safetensors import safe_open

    with safe_open(saved.folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    layer = "encoder.blocks.1.mlp."
    assert names == {
        *("head.weight", "head.bias", layer + "router.phi", layer + "router.scale"),
        *(f"{layer}experts.{part}" for part in ("w1", "b1", "w2", "b2")),
    }
    assert open_saved(saved.folder).classes == tuple("abcde")
    assert from_pretrained(saved.folder, "meta").head.weight.is_meta


def test_a_base_whose_head_sees_several_blocks(tmp_path):
    """The base's head is its own affair: adapters with a plain head are read again, whatever it looks at."""
    base = tmp_path / "base"
    save_pretrained(VisionTransformer(replace(BASE, head_blocks=(0, 1))), base)
    model = adapted(base)
    save_adapters(model, tmp_path / "adapters", base)
    images = torch.randn(2, 3, 24, 24)
    assert torch.equal(from_pretrained(tmp_path / "adapters")(images), model(images))


def test_what_else_was_trained_is_saved_too(base, tmp_path):
    """A norm that learned belongs to the adapters: they are all that differs from the base."""
    model = adapted(base)
    nn.init.normal_(model.encoder.norm.weight)
    save_adapters(model, tmp_path / "adapters", base)
    images = torch.randn(2, 3, 24, 24)
    assert torch.equal(from_pretrained(tmp_path / "adapters")(images), model(images))


def test_a_base_that_moved_is_found_beside(base, tmp_path):
    """Adapters and base in one folder may be moved together."""
    model = adapted(base)
    save_adapters(model, tmp_path / "adapters", base)
    (tmp_path / "elsewhere").mkdir()
    for name in ("base", "adapters"):
        shutil.move(tmp_path / name, tmp_path / "elsewhere" / name)
    images = torch.randn(2, 3, 24, 24)
    assert torch.equal(from_pretrained(tmp_path / "elsewhere" / "adapters")(images), model(images))
    shutil.rmtree(tmp_path / "elsewhere" / "base")
    with pytest.raises(ValueError, match=r"their base .* cannot be read .* beside them as"):
        from_pretrained(tmp_path / "elsewhere" / "adapters")


def test_another_base_is_refused(base, tmp_path):
    """Weights other than those the adapters were trained on are told by their fingerprint."""
    save_adapters(adapted(base), tmp_path / "adapters", base)
    save_pretrained(VisionTransformer(BASE), base)
    with pytest.raises(ValueError, match=r"adapters for another base: .* get the base they were trained on"):
        from_pretrained(tmp_path / "adapters")


def test_adapters_are_no_base(base, tmp_path):
    """Adapters on adapters are refused, and the sentence names the base."""
    model = adapted(base)
    save_adapters(model, tmp_path / "adapters", base)
    with pytest.raises(ValueError, match="holds adapters itself: give its base"):
        save_adapters(model, tmp_path / "more", tmp_path / "adapters")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"where": 3}, "does not tell where the base"),
        ({"fingerprint": "x"}, "no fingerprint"),
    ],
)
def test_damaged_facts(base, tmp_path, change, words):
    """What a stranger wrote in config.json ends in one sentence."""
    save_adapters(adapted(base), tmp_path / "adapters", base)
    path = tmp_path / "adapters" / "config.json"
    values = json.loads(path.read_text())
    values["provenance"]["base"] |= change
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=words):
        from_pretrained(tmp_path / "adapters")


def test_a_model_of_another_depth_is_refused(base, tmp_path):
    """config.json cannot ask for more blocks than the base has."""
    save_adapters(adapted(base), tmp_path / "adapters", base)
    path = tmp_path / "adapters" / "config.json"
    values = json.loads(path.read_text())
    values["architecture"]["depth"] = 3
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="another model than its base"):
        from_pretrained(tmp_path / "adapters")
