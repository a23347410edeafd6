"""Models by name, and what the names mean."""

import json

import pytest
import torch
from oracle import PAPER_PARAMS

from softmoe import create_model, list_models
from softmoe.models import MoEConfig, ViTConfig, model_config
from softmoe.models.registry import PAPER_MODELS, SIZES
from softmoe.moe.config import ROUTERS


@pytest.mark.parametrize("name", PAPER_PARAMS)
def test_parameter_counts_of_the_paper(name):
    """Equal to the unit; on the meta device, the 54-billion one too."""
    with torch.device("meta"):
        model = create_model(name, num_classes=29_593)
    assert sum(parameter.numel() for parameter in model.parameters()) == PAPER_PARAMS[name]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_paper_models_are_listed():
    """All long runs by name."""
    assert set(PAPER_PARAMS) == set(PAPER_MODELS)
    assert set(PAPER_PARAMS) <= set(list_models())


def test_every_listed_model_builds():
    """Sorted, without repeats, for each router and size."""
    names = list_models()
    assert names == sorted(set(names))
    for router in ROUTERS:
        assert f"{router}_s16_32e" in names
    for name in names:
        with torch.device("meta"):
            create_model(name, depth=2)  # two blocks have every part that a whole model has


def test_a_name_is_router_size_patch_experts_slots():
    """soft_b8_16e4p: soft routing, size B, patches of 8, 16 experts of 4 slots."""
    config = model_config("soft_b8_16e4p", num_classes=10, image_size=64)
    assert (config.width, config.depth, config.mlp_dim, config.heads) == SIZES["b"]
    assert (config.patch_size, config.num_classes, config.image_size, config.tokens) == (8, 10, 64, 64)
    assert config.moe == MoEConfig.of(router="soft", num_experts=16, slots_per_expert=4)
    assert config.moe_blocks == (6, 7, 8, 9, 10, 11)
    assert model_config("vit_ti16").moe is None
    assert model_config("experts_choice_s32_8e").moe == MoEConfig.of(router="experts_choice", num_experts=8)


def test_overrides_reach_the_model_and_its_experts():
    """Fields of both configurations may be set by name."""
    model = create_model(
        "tokens_choice_ti16_4e",
        num_classes=3,
        image_size=32,
        depth=3,
        top_k=2,
        capacity_factor=1.5,
        batch_priority=False,
        group_size=8,
        noise_std=0.5,
        gshard_weight=0.1,
        blocks=(0, 2),
        expert_dropout=0.25,
        qk_norm=False,
    )
    blocks = model.encoder.blocks
    assert [type(block.mlp).__name__ for block in blocks] == ["MoE", "MLP", "MoE"]
    router = blocks[0].mlp.router
    assert (router.top_k, router.capacity_factor, router.batch_priority) == (2, 1.5, False)
    assert (router.group_size, router.noise_std, router.gshard_weight) == (8, 0.5, 0.1)
    assert blocks[0].mlp.experts.dropout == 0.25
    assert isinstance(blocks[0].attention.query_norm, torch.nn.Identity)


@pytest.mark.parametrize(("depth", "blocks"), [(1, (0,)), (2, (1,)), (3, (2,)), (12, (6, 7, 8, 9, 10, 11))])
def test_experts_stand_in_the_second_half(depth, blocks):
    """The last depth // 2 blocks, or the only one; an odd middle block stays dense."""
    assert model_config("soft_ti16_4e", depth=depth).moe_blocks == blocks


@pytest.mark.parametrize(("name", "noise"), [("soft", 0.0), ("tokens_choice", 1.0), ("experts_choice", 1.0)])
def test_noise_by_default(name, noise):
    """Sparse routers are trained with noise, soft ones without."""
    assert MoEConfig.of(router=name, num_experts=4).router.build(8).noise_std == noise


@pytest.mark.parametrize("name", ["vit_ti16", "soft_ti16_4e"])
def test_configurations_survive_json(name):
    """What is kept beside a saved model gives the same configuration back."""
    config = model_config(name, image_size=(32, 64), **({"blocks": (1, 3)} if name != "vit_ti16" else {}))
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("soft_s16_128", "unknown model 'soft_s16_128', did you mean .*soft_s16_128e"),
        ("vitt_s16", "unknown model 'vitt_s16', did you mean vit_s16"),
        ("softt_s16_32e", "did you mean soft_s16_32e"),
        ("resnet50", "unknown model 'resnet50'"),
        ("", "unknown model ''"),
        ("vit_s16_32e", "only models with experts end in their number, as in vit_s16"),
        ("soft_s16", "only models with experts end in their number, as in soft_s16_32e"),
        ("soft_s16_0e", "num_experts must be at least 1, got 0"),
        ("soft_s16_4e0p", "slots_per_expert must be at least 1, got 0"),
        ("vit_s0", "patch_size must be at least 1, got 0"),
    ],
)
def test_unknown_names_offer_the_nearest(name, message):
    """A name that does not exist, or cannot, is refused with what to do."""
    with pytest.raises(ValueError, match=message):
        create_model(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_expert": 4}, "unknown model option 'num_expert', did you mean 'num_experts'"),
        ({"widht": 4}, "unknown model option 'widht', did you mean 'width'"),
        ({"heads": 5}, "heads must divide the width: 192 is not a multiple of 5"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"image_size": 8}, "image of 8 x 8 is smaller than one patch of 16 pixels"),
        ({"image_size": (64, 8)}, "image of 64 x 8 is smaller than one patch of 16 pixels"),
        ({"num_classes": -1}, "num_classes must be at least 1, or None for no head, got -1"),
        ({"pretrained": True}, "softmoe.from_pretrained takes files, folders and Hub ids"),
        ({"pool": "max"}, "pool must be one of mean, class, attention, concat, got 'max'"),
        ({"positions": "rope"}, "positions must be one of learned, sincos, none, got 'rope'"),
        ({"width": 18, "heads": 3, "positions": "sincos"}, "multiple of 4 and at least 8, got 18"),
        ({"blocks": (12,)}, r"MoE blocks must be different indices from 0 to 11, got \[12\]"),
        ({"blocks": (1, 1)}, r"MoE blocks must be different indices from 0 to 11, got \[1, 1\]"),
        ({"router": "sft"}, "unknown router 'sft', expected one of: soft, "),
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"router": "tokens_choice", "top_k": 9}, "top_k must be between 1 and the 4 experts, got 9"),
        ({"dropout": 1.5}, "dropout"),
        ({"attention_dropout": 1.5}, "dropout"),
        ({"expert_dropout": -0.5}, "dropout"),
    ],
)
def test_bad_options(options, message):
    """Each option out of range is named with its value, when the model is built."""
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        create_model("soft_ti16_4e", **options)


def test_expert_options_need_experts():
    """A dense model has no experts to set."""
    with pytest.raises(ValueError, match="unknown model option 'num_experts'"):
        create_model("vit_ti16", num_experts=4)


def test_pixels_that_are_not_seen_are_told():
    """A size that is no whole number of patches makes the model with a warning that names sizes that are."""
    with pytest.warns(UserWarning, match="vit_ti16: the last 4 of the 36 pixels of the width .* 32 and 48 are whole"):
        model = create_model("vit_ti16", image_size=(32, 36), depth=1)
    assert model.config.grid == (2, 2)
    create_model("vit_ti16", image_size=(32, 48), depth=1)
