"""Slots that stay: by plain loops, in a model, with masks, at other image sizes, in files, and what is refused."""

import json

import oracle
import pytest
import torch
from torch import nn

import softmoe
from softmoe.cli.train import parse_train
from softmoe.convert import to_vmoe
from softmoe.inference import prepare
from softmoe.inspection import record
from softmoe.inspection.collect import Inspection, layer_results
from softmoe.inspection.doctor import examine_layers
from softmoe.inspection.page import header, layer_lines
from softmoe.inspection.plots import cumulative_combine
from softmoe.models import TextConfig, ViTConfig
from softmoe.models.moe_config import MoEConfig
from softmoe.models.vit import make_encoder
from softmoe.moe import Experts, MoE, NotCombined, PlacedRouter, SlotsRouter, SoftRouter, TokensChoiceRouter, ToSlots

TINY = {"width": 16, "depth": 3, "mlp_dim": 32, "heads": 2, "num_classes": 5, "image_size": 32}
STAY = {"blocks": (1, 2), "slots_stay": True}


def tiny(name: str = "placed_ti8_4e2p", **options):
    """A small model of 16 tokens, 8 slots from its second block on, whose head does not start at zero."""
    model = softmoe.create_model(name, **(TINY | STAY | options))
    nn.init.normal_(model.head.weight)
    return model.eval()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("router", [SoftRouter, PlacedRouter])
def test_the_layer_by_loops(router, masked):
    """Slots are averages of the residual tokens, and experts see the same averages of the normalized ones. Masked
    tokens, whatever they hold, are in neither."""
    torch.manual_seed(0)
    layer = ToSlots(router(6, 3, 2), Experts(6, 5, 3)).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, residual = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True, False, True, False]]) if masked else None
    grid = (2, 2) if router is PlacedRouter else None
    hidden = torch.zeros(2, 4, 1) if mask is None else torch.where(mask[..., None], 0.0, torch.nan)
    kept, added = layer(x + hidden, mask, grid, residual=residual + hidden)
    logits = oracle.soft_logits(x.numpy(), layer.router.phi.detach().numpy(), layer.router.scale.item())
    if router is PlacedRouter:
        place = layer.router.place
        widths = place.log_width.detach().exp().numpy()
        logits = logits + oracle.place_bias(place.center.detach().numpy(), widths, oracle.grid_places(2, 2), 0)
    weights = oracle.dispatch_weights(logits, None if mask is None else mask.numpy())
    experts = oracle.ExpertWeights.of(layer.experts)
    for b, n, p in [(b, n, p) for b in range(2) for n in range(3) for p in range(2)]:
        share = weights[b, :, n, p]
        wanted_kept = sum(w * token for w, token in zip(share, residual[b].numpy(), strict=True))
        wanted_added = experts(n, sum(w * token for w, token in zip(share, x[b].numpy(), strict=True)))
        torch.testing.assert_close(kept[b, 2 * n + p], torch.from_numpy(wanted_kept), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(added[b, 2 * n + p], torch.from_numpy(wanted_added), rtol=1e-10, atol=1e-10)


def test_later_layers_route_nothing():
    """Slot p of expert n goes to expert n and comes back to its place; another number of tokens is refused."""
    torch.manual_seed(0)
    layer = MoE(SlotsRouter(6, 3, 2), Experts(6, 5, 3)).double()
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    experts = oracle.ExpertWeights.of(layer.experts)
    y = layer(x)
    for b, slot in [(b, slot) for b in range(2) for slot in range(6)]:
        wanted = torch.from_numpy(experts(slot // 2, x[b, slot].numpy()))
        torch.testing.assert_close(y[b, slot], wanted, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="expected the 3 x 2 slots of an earlier layer, without a mask, got 5 tokens"):
        layer(x[:, :5])


def test_gradients_by_finite_differences():
    """All gradients of both outputs: of tokens, residual tokens, router and experts."""
    torch.manual_seed(0)
    layer = ToSlots(SoftRouter(3, 2, 2), Experts(3, 2, 2)).double()
    x, residual = (torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def both(x, residual, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(layer, named, (x,), {"residual": residual})

    assert torch.autograd.gradcheck(both, (x, residual, *layer.parameters()))


@pytest.mark.parametrize(
    "options", [{}, {"pool": "attention"}, {"pool": "concat"}, {"blocks": (0, 1, 2)}, {"name": "soft_ti8_8e"}]
)
def test_a_model_whose_slots_stay(options):
    """Only the slots leave the model; every parameter learns; checkpoints in the backward pass change nothing; any
    image size works; one layer routes."""
    model = tiny(**options)
    images = torch.randn(2, 3, 32, 32)
    assert model.forward_features(images).shape == (2, 8, 16)
    assert model.config.tokens_by_block == (16,) * (min(model.config.moe_blocks) + 1) + (8,) * len(
        model.config.moe_blocks
    )
    model(images).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    wanted = model.encoder.blocks[0].norm1.weight.grad.clone()
    model.zero_grad()
    model.train().set_grad_checkpointing()
    model(images).square().sum().backward()
    torch.testing.assert_close(model.encoder.blocks[0].norm1.weight.grad, wanted)
    assert model(torch.randn(1, 3, 24, 72)).shape == (1, 5)
    with record(model) as recording:
        model(images)
    assert list(recording.routings) == [f"encoder.blocks.{min(model.config.moe_blocks)}.mlp"]


@pytest.mark.parametrize("masked", [False, True])
def test_recorded_slots_go_on_alike(masked):
    """Nothing is combined, so a recorded routing has even weights there, and none at masked tokens."""
    layer = ToSlots(SoftRouter(6, 3, 2, scale_init=9.0), Experts(6, 5, 3))
    x = torch.randn(2, 4, 6)
    mask = torch.tensor([[True] * 4, [True, False, True, False]]) if masked else None
    with record(layer) as recording:
        layer(x, mask, residual=x)
    routing = recording.routings["moe"]
    assert isinstance(routing, NotCombined)
    wanted = torch.full((2, 4, 3, 2), 1 / 6) * (1.0 if mask is None else mask[..., None, None])
    torch.testing.assert_close(routing.combine_weights, wanted)
    assert routing.dispatch_weights.max() > 0.3


def test_no_images():
    """A batch of none goes through, as it does through models that combine."""
    for images in (0, 1):
        assert tiny()(torch.randn(images, 3, 32, 32)).shape == (images, 5)


def test_inspected_slots_that_stay():
    """Inspection and doctor leave out all findings on combine for a layer that combines nothing."""
    torch.manual_seed(0)
    images, layers = layer_results(tiny(), [torch.randn(4, 3, 32, 32)])
    (result,) = layers.values()
    assert (images, result["combines"]) == (4, False)
    judged = {verdict.check for verdict in examine_layers(layers)}
    assert {"uniform dispatch"} <= judged
    assert not judged & {"saturated combine", "dead slots", "expert collapse"}
    line = dict(zip(header(found := Inspection("m", 4, layers, {})), layer_lines(found)[0], strict=True))
    assert line["largest combine"] == line["slots per token"] == line["expert max/min"] == "-"
    assert float(line["largest dispatch"]) > 0
    assert cumulative_combine(found) is None


def test_a_residual_of_another_shape():
    """The residual tokens are those that the experts see without the norm, one for one."""
    layer = ToSlots(SoftRouter(6, 3, 2), Experts(6, 5, 3))
    with pytest.raises(ValueError, match="tokens and residual tokens of one shape"):
        layer(torch.randn(2, 4, 6), residual=torch.randn(1, 4, 6))
    with pytest.raises(ValueError, match="slots that stay are learned averages"):
        ToSlots(TokensChoiceRouter(6, 3), Experts(6, 5, 3))


@pytest.mark.parametrize("init", ["copy", "beside"])
def test_dense_models_get_no_slots_that_stay(init):
    """A layer without a way back cannot keep what an MLP gave, so upcycling refuses it instead of leaving it out."""
    dense, images = softmoe.create_model("vit_ti8", **TINY), torch.randn(2, 3, 32, 32)
    with pytest.raises(ValueError, match="with slots_stay no token gets back what its MLP gave"):
        softmoe.upcycle(dense, 4, images=images, init=init, blocks=(1, 2), slots_stay=True)
    with pytest.raises(ValueError, match="slots_stay is for whole models of ours"):
        softmoe.upcycle_(dense, "encoder.blocks.*.mlp", 4, init=init, batches=images, slots_stay=True)


def test_one_expert_is_an_mlp_for_all_slots():
    """With one expert the later blocks are those of a dense model on as many tokens."""
    model = tiny("soft_ti8_1e", num_experts=1, slots_per_expert=8)
    x = torch.randn(2, 8, 16)
    layer = model.encoder.blocks[2].mlp
    torch.testing.assert_close(layer(x), layer.experts(x.flatten(0, 1)[None])[0].view_as(x))


@pytest.mark.parametrize("name", ["placed_ti8_4e2p", "soft_ti8_4e2p"])
def test_saved_and_prepared(name, tmp_path):
    """A saved folder and a model prepared for inference give the same outputs, and the config survives JSON."""
    model = tiny(name)
    softmoe.save_pretrained(model, tmp_path / "model")
    assert ViTConfig.from_dict(json.loads(json.dumps(model.config.to_dict()))) == model.config
    images = torch.randn(3, 3, 32, 32)
    again = softmoe.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(again(images), model(images))
    torch.testing.assert_close(prepare(again)(images), model(images), rtol=1e-4, atol=1e-5)


def test_maps_end_where_slots_begin():
    """The blocks before give maps, those from the first with experts on tokens only."""
    model, images = tiny(), torch.randn(1, 3, 32, 32)
    assert model.forward_intermediates(images, [0], intermediates_only=True)[0].shape == (1, 16, 4, 4)
    assert model.forward_intermediates(images, [2], output_fmt="NLC")[1][0].shape == (1, 8, 16)
    with pytest.raises(ValueError, match="after block 1 tokens are no longer cells of the image, so there are no maps"):
        model.forward_intermediates(images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": (1,)}, r"all blocks from the first with experts on have them, up to 2, got \[1\]"),
        ({"pool": "class"}, "nothing but slots goes on: take pool mean, attention or concat, and no registers"),
        ({"registers": 1}, "nothing but slots goes on"),
        ({"keep_mlp": True}, "with slots_stay there are slots alone"),
        ({"router": "identity"}, "slots_stay needs a learned dispatch, as soft and placed have: not 'identity'"),
        ({"router": "uniform_soft"}, "not 'uniform_soft'"),
        ({"merge": (1, 5)}, "merge is for models without experts"),
    ],
)
def test_mistakes(options, message):
    """Settings that cannot go together with slots that stay are refused when the model is made."""
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_texts_and_the_reference_have_no_such_layer():
    """A text tower refuses it, and so does the export to the names of the paper's code."""
    with pytest.raises(ValueError, match="slots_stay is for images"):
        make_encoder(TextConfig(width=16, depth=2, mlp_dim=16, heads=2, moe=MoEConfig.of("soft", 2, slots_stay=True)))
    with pytest.raises(ValueError, match="slots that stay"):
        to_vmoe(tiny("soft_ti8_4e2p"))
    with pytest.raises(ValueError, match="no layer whose slots go on"):
        to_vmoe(tiny("soft_ti8_4e2p").encoder.blocks[1].mlp)


def test_on_the_command_line():
    """One option makes the slots of a recipe stay; its dense twin has no such thing."""
    stay = ["--model.slots-stay", "True"]
    config, _ = parse_train("quickstart", [*stay, "--model.num-experts", "4"])
    assert config.model.resolve(10, 32).tokens_by_block == (16, 16, 16, 4)
    config, _ = parse_train("quickstart", [*stay, "--model.router", "dense"])
    assert config.model.resolve(10, 32).tokens_by_block == (16,) * 4
