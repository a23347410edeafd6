"""From one model to the start of another run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from convert.plain import PlainViT, timm_names
from routers import moe_of
from safetensors.torch import save_file

from softmoe import save_pretrained
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.moe.routing import ROUTERS
from softmoe.storage import from_pretrained, open_saved
from softmoe.train import OptimSection, train
from softmoe.train.folder import write_model
from softmoe.train.optim import parameter_groups
from softmoe.train.run import start_from
from softmoe.transfer.finetune import section_of, transfer_config

SHAPE = ViTConfig(
    image_size=16,
    patch_size=4,
    width=16,
    depth=2,
    mlp_dim=16,
    heads=2,
    num_classes=7,
    moe=MoEConfig.of(num_experts=3, slots_per_expert=2, blocks=(1,)),
)


def saved_model(folder: Path, shape: ViTConfig = SHAPE) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_pretrained(model, folder)
    return model


@pytest.mark.parametrize("router", [None, *ROUTERS])
def test_settings_resolve_to_the_model(router):
    """section_of(shape).resolve gives the shape back, for the data's classes and size."""
    moe = router and moe_of(router, num_experts=3, top_k=2, blocks=(0,), normalize=False, expert_dropout=0.1)
    shape = replace(SHAPE, moe=moe or None, pool="class", qk_norm=False, activation="gelu", representation_size=5)
    assert section_of(shape).resolve(11, (20, 24)) == replace(shape, num_classes=11, image_size=(20, 24))


@pytest.mark.parametrize("pool", ["mean", "class"])
@pytest.mark.parametrize("size", [16, 32, (12, 20), (16, 40)])
def test_start_at_another_size(pool, size, tmp_path):
    """Any size, square or not: the features of the new model are those of the old one on such images; slots as is."""
    old = saved_model(tmp_path / "old", replace(SHAPE, pool=pool)).eval()
    new = VisionTransformer(replace(SHAPE, pool=pool, image_size=size, num_classes=4)).eval()
    start_from(new, tmp_path / "old")
    images = torch.randn(2, 3, *new.config.image_shape)
    torch.testing.assert_close(new.forward_features(images), old.forward_features(images))
    assert new.positions.grid == new.config.grid
    assert torch.equal(new.encoder.blocks[1].mlp.router.phi, old.encoder.blocks[1].mlp.router.phi)
    assert not new.head.weight.any()


def test_the_head_is_kept_on_request(tmp_path):
    """new_head=False copies it, and needs the same number of classes."""
    old = saved_model(tmp_path / "old")
    new = VisionTransformer(SHAPE)
    start_from(new, tmp_path / "old", new_head=False)
    assert all(torch.equal(value, old.state_dict()[name]) for name, value in new.state_dict().items())
    with pytest.raises(ValueError, match="has 7 classes, the data has 4: start with a new head"):
        start_from(VisionTransformer(replace(SHAPE, num_classes=4)), tmp_path / "old", new_head=False)


def test_another_model_is_refused_by_name(tmp_path):
    """Every difference is told; nothing is copied."""
    saved_model(tmp_path / "old")
    other = VisionTransformer(replace(SHAPE, activation="gelu", moe=MoEConfig.of(num_experts=4, blocks=(1,))))
    words = "activation gelu_tanh and gelu; num_experts 3 and 4; slots_per_expert 2 and 1"
    with pytest.raises(ValueError, match=words):
        start_from(other, tmp_path / "old")


def test_a_run_that_starts_from_a_model(make_config, tmp_path):
    """Trains on other classes at another size, resumes, and exports a model that knows its classes."""
    saved_model(tmp_path / "old")
    config = transfer_config(make_config(steps=3), tmp_path / "old", image_size=(16, 24))
    assert config.data.transform.image_size == (16, 24)
    train(config)
    result = train(replace(config, steps=4))
    assert result.step == 4
    saved = write_model(result.folder)
    assert saved.config.image_size == (16, 24)
    assert saved.classes is not None
    assert len(saved.classes) == saved.config.num_classes
    assert saved.provenance["weights"] == str(tmp_path / "old")
    assert open_saved(result.folder.path).folder == result.folder.path / "model"
    assert from_pretrained(result.folder.path).config == saved.config


def test_the_first_step_is_from_the_weights(make_config, tmp_path):
    """With a learning rate of 0 the run ends where the model was, but for the head and the positions."""
    old = saved_model(tmp_path / "old").state_dict()
    config = transfer_config(make_config(steps=1, **{"schedule.peak": 0.0}), tmp_path / "old", image_size=24)
    result = train(config)
    new = from_pretrained(result.folder.checkpoints / "last").state_dict()
    same = [name for name in old if not name.startswith("head.") and name != "positions.table"]
    assert all(torch.equal(new[name], old[name]) for name in same)
    assert new["positions.table"].shape == (1, 36, 16)


def test_others_weights_can_be_fine_tuned(make_config, tmp_path):
    """A file in timm's naming is a model to start from."""
    state = {name: value.float().contiguous() for name, value in timm_names(PlainViT(dim=64, heads=1)).items()}
    save_file(state, tmp_path / "model.safetensors")
    weights = f"{tmp_path / 'model.safetensors'}?mean=0.5&std=0.5"
    config = transfer_config(make_config(steps=1), weights, image_size=16)
    assert (config.model.pool, config.model.activation, config.model.router) == ("class", "gelu", None)
    assert train(config).step == 1


def test_layer_decay():
    """The head at the full rate, each block below at that share of the one above, the embedding lowest."""
    model = VisionTransformer(replace(SHAPE, pool="class"))
    groups = parameter_groups(model, OptimSection(layer_decay=0.5, lr_patterns=((r"router\.phi", 3.0),)))
    factors = {name: group["lr_factor"] for group in groups for name in group["names"]}
    assert factors["head.weight"] == factors["encoder.norm.weight"] == 1.0
    assert factors["encoder.blocks.1.attention.qkv.weight"] == 0.5
    assert factors["encoder.blocks.1.mlp.router.phi"] == 1.5
    assert factors["encoder.blocks.0.mlp.fc1.weight"] == 0.25
    assert {factors[name] for name in ("embed.proj.weight", "positions.table", "class_token")} == {0.125}
    assert factors.keys() == dict(model.named_parameters()).keys()


def test_layer_decay_must_be_a_share(make_config):
    """In (0, 1]."""
    with pytest.raises(ValueError, match="layer_decay must be above 0 and at most 1"):
        make_config(**{"optim.layer_decay": 1.5}).check()
