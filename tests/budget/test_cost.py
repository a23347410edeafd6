"""Parameters and FLOPs by formula, against the real models and torch's own counter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import PAPER_PARAMS
from routers import moe_of
from torch.utils.flop_counter import FlopCounterMode

import softmoe
from softmoe.budget import cost, training_flops
from softmoe.budget.count import FORWARD, TRAIN, elementwise
from softmoe.budget.parts import backward_macs
from softmoe.models import VisionTransformer, ViTConfig, create_model, model_config
from softmoe.moe.config import ROUTERS
from softmoe.train import OptimSection
from softmoe.train.optim import is_frozen, parameter_groups

BATCH = 2


@st.composite
def configs(draw: st.DrawFn, routers: tuple[str | None, ...] = (None, *ROUTERS)) -> ViTConfig:
    """Every option that changes a count, on images that need not be square; routing groups divide the batch."""
    heads = draw(st.integers(1, 3))
    depth = draw(st.integers(1, 3))
    config = ViTConfig(
        image_size=(draw(st.integers(8, 20)), draw(st.integers(8, 20))),
        patch_size=draw(st.sampled_from([4, 5, 8])),
        width=8 * heads,
        depth=depth,
        mlp_dim=draw(st.integers(3, 20)),
        heads=heads,
        num_classes=draw(st.sampled_from([None, 1, 7])),
        pool=draw(st.sampled_from(["mean", "class", "attention"])),
        positions=draw(st.sampled_from(["learned", "sincos", "none"])),
        qk_norm=draw(st.booleans()),
        representation_size=draw(st.sampled_from([None, 5])),
        head_blocks=draw(st.sampled_from([(), (0,), tuple(range(depth))])),
    )
    router = draw(st.sampled_from(routers))
    if router is None:
        merge = draw(st.none() | st.tuples(st.integers(0, depth - 1), st.integers(1, 5)))
        config = replace(config, registers=draw(st.integers(0, 2)), merge=merge)
        return replace(config, pool=draw(st.sampled_from([config.pool, "concat"]))) if merge else config
    moe = moe_of(
        router,
        num_experts=draw(st.integers(2, 5)),
        slots_per_expert=draw(st.integers(1, 3)),
        blocks=draw(st.sampled_from([None, (0,), tuple(range(depth)), ()])),
        normalize=draw(st.booleans()),
        top_k=draw(st.integers(1, 2)),
        capacity_factor=draw(st.sampled_from([0.5, 1.0, 1.5])),
        group_size=draw(st.sampled_from([None, config.tokens, BATCH * config.tokens])),
        expert_dim=draw(st.sampled_from([None, 2])),
        **draw(st.sampled_from([{}, {"keep_mlp": True}, {"keep_mlp": True, "kept_dim": 3}])),
    )
    if router in ("soft", "placed") and config.pool != "class" and not moe.keep_mlp and moe.blocks not in ((0,), ()):
        moe = replace(moe, slots_stay=draw(st.booleans()))
        config = replace(config, pool=draw(st.sampled_from([config.pool, "concat"]))) if moe.slots_stay else config
    return replace(config, moe=moe)


@pytest.mark.parametrize("router", [None, *ROUTERS])
@settings(max_examples=8)
@given(data=st.data())
def test_parameters_and_products_are_exact(router: str | None, data: st.DataObject) -> None:
    """Parameters equal the model's; forward and backward products equal what torch counts when the model runs."""
    config = data.draw(configs((router,)))
    with torch.device("meta"):
        model = VisionTransformer(config)
        images = torch.empty(BATCH, 3, *config.image_shape)
    c = cost(config)
    assert c.params == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        outputs = model(images)
        assert counter.get_total_flops() == BATCH * 2 * c.macs
        outputs.sum().backward()
    assert counter.get_total_flops() == BATCH * (c.train_flops - elementwise(config, TRAIN))
    assert c.forward_flops - elementwise(config, FORWARD) == 2 * c.macs


@given(configs(), st.sampled_from(["ours", "paper"]))
def test_parts_sum_to_the_totals(config: ViTConfig, convention: str) -> None:
    """Nothing is lost between the parts and the totals, in either convention."""
    c = cost(config, convention=convention)  # pyright: ignore[reportArgumentType]
    assert sum(part.params for part in c.parts.values()) == c.params
    assert sum(part.macs for part in c.parts.values()) == c.macs
    assert all(isinstance(part.params, int) and isinstance(part.macs, int) for part in c.parts.values())


@given(configs())
def test_paper_convention_adds_the_one_hot_products_only(config: ViTConfig) -> None:
    """Two products with the (tokens x experts x capacity) mask for each sparse layer; no difference elsewhere."""
    ours, paper = cost(config), cost(config, convention="paper")
    moe = config.moe
    if moe is None or moe.router.name not in ("tokens_choice", "experts_choice"):
        assert ours == paper
        return
    group = moe.router.group_size or config.tokens
    choices = moe.router.top_k if moe.router.name == "tokens_choice" else 1
    capacity = max(1, round(group * choices * moe.router.capacity_factor / moe.num_experts))
    mask = config.tokens * moe.num_experts * capacity
    layers = len(config.moe_blocks)
    assert paper.macs - ours.macs == layers * 2 * mask * config.width
    assert paper.forward_flops - ours.forward_flops == 2 * (paper.macs - ours.macs) + layers * 5 * mask
    assert paper.params == ours.params


@pytest.mark.parametrize(("name", "params"), PAPER_PARAMS.items())
def test_parameters_of_the_paper(name: str, params: int) -> None:
    """To the unit, by formula, for all ten models of the long runs."""
    assert cost(name, num_classes=29_593).params == params


@pytest.mark.parametrize("name", ["soft_h14_256e", "vit_l16"])
def test_parameters_of_large_models_on_the_meta_device(name: str) -> None:
    """The formula equals the real thing at full size too."""
    with torch.device("meta"):
        model = create_model(name, num_classes=29_593)
    assert sum(p.numel() for p in model.parameters()) == PAPER_PARAMS[name] == cost(model).params


def test_formula_written_out() -> None:
    """Soft S/16 128E with numbers in place of names, to be read against the paper: 3 n S d for routing."""
    n, d, h, S, layers, classes = 196, 384, 1536, 128, 6, 29_593
    macs = n * 768 * d + d * classes + 12 * (4 * n * d**2 + 2 * n**2 * d) + 6 * 2 * n * d * h
    macs += layers * (2 * S * d * h + 3 * n * S * d)
    c = cost("soft_s16_128e", num_classes=classes)
    assert c.macs == macs
    assert c.parts["routing"] == (layers * (d * S + 1), layers * 3 * n * S * d)
    assert c.parts["experts"].macs == layers * 2 * S * d * h
    assert c.parts["head"] == ((d + 1) * classes, d * classes)


def test_elementwise_terms_of_vit_h14() -> None:
    """XLA's count of ViT H/14 is 334.2 GFLOP with QK-norm and 334.07 without."""
    assert round(cost("vit_h14", num_classes=29_593).forward_flops / 1e9, 1) == 334.2
    assert round(cost("vit_h14", num_classes=29_593, qk_norm=False).forward_flops / 1e9, 2) == 334.07


def test_groups_over_images_share_their_rows() -> None:
    """Groups of 8 images with capacity 49 for 32 experts: 196 rows per image, as one expert pass over its tokens."""
    c = cost("tokens_choice_s16_32e", group_size=1568)
    assert c.parts["experts"].macs == 6 * 2 * 196 * 384 * 1536


def test_a_model_its_configuration_and_its_name_cost_the_same() -> None:
    """All three are taken, with the overrides of create_model."""
    name, config = "soft_ti16_4e", model_config("soft_ti16_4e", num_classes=10, slots_per_expert=3)
    with torch.device("meta"):
        model = VisionTransformer(config)
    expected = cost(config)
    assert softmoe.cost(model) == expected
    assert cost(name, num_classes=10, slots_per_expert=3) == expected
    assert cost(model_config(name), num_classes=10, slots_per_expert=3) == expected
    assert expected.to_dict()["parts"]["head"] == {"params": 193 * 10, "macs": 1920}


def test_the_random_state_is_left_alone() -> None:
    """Asking for a cost does not change what the program draws next."""
    before = torch.get_rng_state()
    cost("tokens_choice_ti16_4e")
    cost("soft_ti16_4e")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost("vit_s15x"), "unknown model 'vit_s15x'"),
        (lambda: cost("vit_s16", clases=3), "did you mean 'num_classes'"),
        (lambda: cost("vit_s16", convention="theirs"), "convention must be 'ours' or 'paper', got 'theirs'"),
        (lambda: cost(3), "expected a model, its configuration or its name, got int"),
        (lambda: cost(torch.nn.Linear(2, 2)), "got Linear"),
        (lambda: cost("vit_s16", heads=5), "heads must divide the width: 384 is not a multiple of 5"),
        (lambda: cost("vit_s16", heads=0), "heads must be at least 1"),
        (lambda: cost("vit_s16", image_size=(224, 8)), "224 x 8 is smaller than one patch of 16"),
        (lambda: cost("vit_s16", pool="max"), "pool must be one of"),
        (lambda: cost("vit_s16", positions="sincos", width=6, heads=1), "multiple of 4"),
        (lambda: cost("soft_s16_8e", blocks=(12,)), "MoE blocks"),
        (lambda: cost("tokens_choice_s16_2e", top_k=3), "top_k must be between 1 and the 2 experts"),
        (lambda: cost("soft_s16_8e", router="hard"), "unknown router 'hard'"),
        (lambda: cost("vit_s16", num_classes=10**320), "cannot be meant"),
        (lambda: cost("vit_s16", image_size=10**200), "cannot be meant"),
    ],
)
def test_mistakes(call, message: str) -> None:
    """What cannot be built has no cost; the sentence is that of the model."""
    with pytest.raises(ValueError, match=message):
        call()


def products(config: ViTConfig, learned: set[str] | None) -> int:
    """Return the FLOPs that torch counts in the products of a backward pass, where only these parameters learn."""
    with torch.device("meta"):
        model, images = VisionTransformer(config), torch.empty(BATCH, 3, *config.image_shape)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learned is None or name in learned)
    outputs = model(images)
    with FlopCounterMode(display=False) as counter:
        outputs.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("router", [None, *ROUTERS])
@settings(max_examples=8)
@given(data=st.data())
def test_a_frozen_model_has_a_shorter_backward_pass(router: str | None, data: st.DataObject) -> None:
    """With the lower blocks frozen, or all but the head and the experts, products equal those that torch counts."""
    config = replace(data.draw(configs((router,))), num_classes=7)
    with torch.device("meta"):
        model = VisionTransformer(config)
    frozen = data.draw(st.integers(0, config.depth))
    section = OptimSection(freeze=frozen / config.depth)
    adapters = config.pool != "attention" and data.draw(st.booleans())
    learned = {name for group in parameter_groups(model, section, adapters=adapters) for name in group["names"]}
    assert 2 * BATCH * backward_macs(config, learned) == products(config, learned)


def test_flops_of_training_a_part() -> None:
    """A head alone costs its own gradient beside the forward pass; half of the blocks about a third less than all."""
    config = model_config("soft_ti16_16e", num_classes=10, image_size=64)
    with torch.device("meta"):
        names = [name for name, _ in VisionTransformer(config).named_parameters()]
    whole = cost(config)
    assert training_flops(config) == training_flops(config, names) == whole.train_flops
    head = training_flops(config, ["head.weight", "head.bias"])
    assert whole.forward_flops + 2 * 192 * 10 <= head < 1.001 * whole.forward_flops
    upper = training_flops(config, [name for name in names if not is_frozen(name, 6)])
    assert 0.6 * whole.train_flops < upper < 0.7 * whole.train_flops
