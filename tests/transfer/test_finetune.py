"""From one model to the start of another run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from convert.plain import PlainViT, timm_names
from routers import moe_of
from safetensors.torch import save_file

from softmoe import save_pretrained
from softmoe.budget import cost
from softmoe.convert import from_pretrained
from softmoe.data import open_source
from softmoe.evaluate.features import Features
from softmoe.evaluate.ridge import Ridge
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.models.classification import Loss, probabilities
from softmoe.moe.config import ROUTERS
from softmoe.storage import open_saved
from softmoe.train import OptimSection, train
from softmoe.train.folder import RunFolder, differences, write_model
from softmoe.train.optim import parameter_groups
from softmoe.train.preview import remarks
from softmoe.train.run import build, start_from, starts_anew
from softmoe.transfer.finetune import (
    SCALES,
    fit_head,
    refit_head,
    scale_head,
    section_of,
    spread_blocks,
    transfer_config,
    widen_head,
)

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


def test_no_weight_is_dropped(tmp_path):
    """A model that lacks a part of the saved one is refused; a part that starts as nothing may be added."""
    plain, framed = (replace(SHAPE, moe=moe_of("placed", 3, blocks=(1,), frame=frame)) for frame in (False, True))
    saved_model(tmp_path / "framed", framed)
    with pytest.raises(ValueError, match=r"lacks \(encoder\.blocks\.1\.mlp\.router\.frame\.\w+\): give it the same"):
        start_from(VisionTransformer(plain), tmp_path / "framed")
    old, new = saved_model(tmp_path / "plain", plain).eval(), VisionTransformer(framed).eval()
    apart = replace(SHAPE, moe=moe_of("placed", 3, blocks=(1,), combine_place=False))
    with pytest.raises(ValueError, match="another model than this run's: combine_place True and False"):
        start_from(VisionTransformer(apart), tmp_path / "plain")
    start_from(new, tmp_path / "plain")
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(new.forward_features(images), old.forward_features(images))


def test_the_head_is_kept_on_request(tmp_path):
    """new_head=False copies it, and needs the same number of classes."""
    old = saved_model(tmp_path / "old")
    new = VisionTransformer(SHAPE)
    start_from(new, tmp_path / "old", new_head=False)
    assert all(torch.equal(value, old.state_dict()[name]) for name, value in new.state_dict().items())
    with pytest.raises(ValueError, match="has 7 classes, the data has 4: start with a new head"):
        start_from(VisionTransformer(replace(SHAPE, num_classes=4)), tmp_path / "old", new_head=False)


def test_the_head_is_kept_for_the_same_classes(make_config, tmp_path):
    """A model of the data's own classes keeps its head, unless told otherwise; other classes and others' weights get
    a new one."""
    first = train(make_config(steps=2, run_name="first"))
    write_model(first.folder)
    saved = str(first.folder.path / "model")
    classes = open_saved(saved).classes
    assert not starts_anew(saved, None, classes)
    assert starts_anew(saved, True, classes)
    assert starts_anew(saved, None, classes[::-1])
    save_file({"x": torch.zeros(1)}, tmp_path / "others.safetensors")
    assert starts_anew(f"{tmp_path}/others.safetensors?mean=0.5&std=0.5", None, classes)
    config = transfer_config(make_config(steps=1, run_name="second"), saved)
    run = build(config, RunFolder.of(config))
    torch.testing.assert_close(run.model.head.weight, from_pretrained(saved).head.weight)
    run.close()
    anew = replace(config, model=replace(config.model, new_head=True))
    assert differences(anew, config, 1) == [], "a run begun before this was a choice goes on"
    assert differences(config, anew, 1) == ["model.new_head: None -> True"]


def test_a_head_on_several_blocks_is_kept_too(make_config, tmp_path, capsys):
    """A run on the classes of a head from --refit-head starts with that head and its blocks, or says why not."""
    torch.manual_seed(0)
    classes = open_source(make_config().data.train, "train").classes
    old = VisionTransformer(replace(SHAPE, num_classes=len(classes), head_blocks=(0, 1)))
    torch.nn.init.normal_(old.head.weight)
    save_pretrained(old, tmp_path / "old", classes=classes)
    config = transfer_config(make_config(steps=2, **{"log.quiet": False, "schedule.peak": 0.0}), tmp_path / "old")
    result = train(replace(config, steps=1))
    assert "the head is kept" in capsys.readouterr().err
    made = from_pretrained(write_model(result.folder).folder)
    assert made.config.head_blocks == (0, 1)
    assert torch.equal(made.head.weight, old.head.weight)
    assert train(config).step == 2, "it goes on"
    for change, why in {"new_head": "--new-head True", "head_blocks": "it was saved for other --head-blocks"}.items():
        value = True if change == "new_head" else (1,)
        other = replace(config, run_name=change, model=replace(config.model, **{change: value}))
        build(other, RunFolder.of(other)).close()
        assert f"the head starts anew: {why}\n" in capsys.readouterr().err


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


def test_blocks_that_a_new_head_sees():
    """Four from the middle to the last, fewer in a small model."""
    assert [spread_blocks(depth) for depth in (12, 24, 4, 2, 1)] == [
        (5, 7, 9, 11),
        (11, 15, 19, 23),
        (1, 2, 3),
        (0, 1),
        (0,),
    ]


def test_a_head_in_closed_form_is_ridge_regression():
    """Its logits are the ridge scores times one factor, and on what it was fitted to it is right."""
    torch.manual_seed(0)
    model = VisionTransformer(replace(SHAPE, num_classes=3, pool="class")).eval()
    widen_head(model, (0, 1))
    images = torch.randn(24, 3, 16, 16)
    with torch.no_grad():
        vectors = model.forward_vector(images).numpy()
        labels = torch.arange(24).numpy() % 3
        vectors[np.arange(24), labels] += 3.0
        l2 = fit_head(model, Features(vectors, labels, np.arange(24), ("a", "b", "c")))
        logits = model.head(torch.from_numpy(vectors)).double().numpy()
    scores = Ridge.fit(vectors, labels, 3).scores(vectors, l2)
    factor = (logits * scores).sum() / (scores * scores).sum()
    np.testing.assert_allclose(logits, factor * scores, rtol=1e-3, atol=1e-3 * factor)
    assert factor > 0
    assert (logits.argmax(1) == labels).mean() > 0.9


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("images", "right"), [(8, 8), (8, 7), (2000, 1900)])
def test_the_scale_of_a_head_is_as_sure_as_the_images_are_right(images: int, right: int, loss: Loss):
    """After 8 images that are all right a head is not surer than 8 in 9; after many it is as sure as they are right."""
    model = VisionTransformer(replace(SHAPE, num_classes=2)).eval()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[0, 0], model.head.weight[1, 0] = 0.01, -0.01
        model.head.bias.zero_()
    vectors = np.zeros((images, SHAPE.width), dtype=np.float32)
    vectors[:, 0] = 40.0
    labels = (np.arange(images) >= right).astype(np.int64)
    scale_head(model, Features(vectors, labels, np.arange(images), ("a", "b")), loss)
    logits = model.head(torch.from_numpy(vectors[:1])).detach()
    expected = (right + 0.5) / (images + 1)
    assert min(SCALES) < float(logits[0, 0]) / 0.4 < max(SCALES)
    sure = torch.logit(probabilities(logits, loss)[0, 0])
    assert abs(float(sure) - np.log(expected / (1 - expected))) < 0.7, "half a step of the grid"


@pytest.mark.parametrize("better", [True, False])
def test_a_run_ends_with_the_better_head(better, make_config, tmp_path, monkeypatch):
    """The run's model has the head in closed form if that is better on validation images, else the one it learned."""
    saved_model(tmp_path / "old", replace(SHAPE, pool="class"))
    result = train(transfer_config(make_config(steps=1, **{"log.quiet": False}), tmp_path / "old"))
    write_model(result.folder)
    plain = open_saved(result.folder.path)
    numbers = {"top1": 1.0 if better else 0.0, "top5": 1.0, "loss": 0.1 if better else 100.0}
    monkeypatch.setattr("softmoe.transfer.finetune.classify", lambda *_, **__: numbers)
    said: list[str] = []
    found = refit_head(result.folder, said.append)
    made = open_saved(result.folder.path)
    assert made.config.head_blocks == ((0, 1) if better else ())
    assert made.classes == plain.classes
    assert made.preprocessing == plain.preprocessing
    assert found["val/top1"] == (1.0 if better else result.numbers["val/top1"])
    assert made.provenance["results"]["val/top1"] == found["val/top1"]
    assert said[0].endswith("gets the new head" if better else "the trained head stays")
    assert not section_of(made.config).head_blocks, "the next run starts with a head of the last block alone"
    from_pretrained(result.folder.path)


def test_adapters_keep_their_head(make_config, tmp_path):
    """A wide head would not be the few weights that adapters are."""
    saved_model(tmp_path / "old", replace(SHAPE, moe=None))
    config = transfer_config(make_config(), tmp_path / "old", adapters=True)
    with pytest.raises(ValueError, match=r"leave out model\.refit_head"):
        replace(config, model=replace(config.model, refit_head=True)).check()


@pytest.mark.parametrize("expert_dim", [1, 64])
def test_adapters_say_how_much_they_train(expert_dim, make_config, tmp_path):
    """The share of head and experts is said, and above 5 % also what has fewer."""
    wide = replace(SHAPE, moe=None, width=128, mlp_dim=512)
    saved_model(tmp_path / "old", wide)
    config = transfer_config(make_config(), tmp_path / "old", adapters=True)
    config = replace(config, model=config.model.change(expert_dim=expert_dim))
    shape = config.model.resolve(num_classes=2, image_size=16)
    learned = cost(shape).params - cost(replace(wide, num_classes=None)).params
    said = remarks(config, shape, open_source("shapes?size=16", "train"))
    assert said[-1].startswith(f"{learned / cost(shape).params:.1%} of the weights are trained and saved")
    assert ("are fewer" in said[-1]) == (expert_dim == 64)
