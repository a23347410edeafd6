"""Experts from MLPs: what the new model computes at the start, and how far that is from the dense one."""

import pytest
import torch
from convert.plain import PlainViT, flax_names, timm_names

from softmoe.convert import from_timm, from_vit
from softmoe.models import VisionTransformer, ViTConfig
from softmoe.transfer.in_place import upcycle_
from softmoe.transfer.upcycling import compare_starts, distance, upcycle
from softmoe.transfer.upcycling_routers import place_directions, refine, spherical_k_means

SHAPE = ViTConfig(image_size=(12, 16), patch_size=4, width=24, depth=4, mlp_dim=32, heads=2, num_classes=5)
IMAGES = torch.randn(16, 3, 12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def dense_model(pool: str = "mean", places: float = 0.3) -> VisionTransformer:
    """`places` is how loud the positions are in the tokens."""
    torch.manual_seed(1)
    model = VisionTransformer(ViTConfig(**{**SHAPE.__dict__, "pool": pool})).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(model.positions.table, std=places)
    return model


def tokens(model: VisionTransformer, index: int) -> torch.Tensor:
    """What the MLP of a block is given."""
    seen = []
    hook = model.encoder.blocks[index].mlp.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(IMAGES)
    hook.remove()
    return seen[0]


class NoDouble(torch.Tensor):
    """A tensor on a device without float64, such as mps; what is computed from it is one too."""

    def double(self) -> torch.Tensor:
        raise TypeError("this device has no float64")

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_devices_without_float64():
    """Outputs are compared on the processor, where there is float64."""
    dense, images = dense_model().float(), IMAGES.float().as_subclass(NoDouble)
    other = upcycle(dense, 4, blocks=(1, 3)).model
    assert distance(dense, other, images).features == 0.0
    assert upcycle_(dense, "encoder.blocks.*.mlp", 4, batches=images).moved == 0.0


@pytest.mark.parametrize("pool", ["mean", "class", "attention"])
def test_the_identity_router_gives_the_dense_model(pool):
    """Each token goes to one expert, and all experts are the MLP: equal but for rounding, whatever their number."""
    dense = dense_model(pool)
    start = upcycle(dense, 5, init="copy", router="identity", blocks=(0, 1, 3), images=IMAGES)
    torch.testing.assert_close(start.model(IMAGES), dense(IMAGES), rtol=1e-10, atol=1e-10)
    assert start.model.config.moe_blocks == (0, 1, 3)
    assert start.distance.features < 1e-10
    assert start.distance.same_class == 1.0
    assert "that token alone" in str(start.distance)


def test_slots_with_a_strong_place_give_the_dense_model():
    """A slot for every token that leans to that token's place alone: equal but for rounding, and told so."""
    dense = dense_model()
    count = dense.config.tokens
    start = upcycle(dense, count, router="placed", place_init=1e3, blocks=(1, 3), images=IMAGES, init="copy")
    torch.testing.assert_close(start.model(IMAGES), dense(IMAGES), rtol=1e-10, atol=1e-10)
    assert max(start.distance.layers.values()) < 1e-10
    assert "that token alone" in str(start.distance)
    weak = upcycle(dense, count, router="placed", place_init=1e-3, blocks=(1, 3), images=IMAGES, init="copy")
    assert min(weak.distance.layers.values()) > 0.1


@pytest.mark.parametrize("router", ["soft", "uniform", "soft_uniform", "uniform_soft"])
def test_equal_experts_act_on_mixtures(router):
    """The true relation: y_i = sum_s C_is f(sum_j D_js x_j), with the old MLP f; not f(x_i)."""
    dense = dense_model()
    start = upcycle(dense, 3, 2, init="copy", router=router, blocks=[2])
    x, f = tokens(dense, 2), dense.encoder.blocks[2].mlp
    layer = start.model.encoder.blocks[2].mlp
    routing = layer.router(x)
    mixed = torch.einsum("bmnp,bmd->bnpd", routing.dispatch_weights, x)
    expected = torch.einsum("bmnp,bnpd->bmd", routing.combine_weights, f(mixed))
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)
    if router == "uniform":  # every token gets the MLP of the mean token
        torch.testing.assert_close(layer(x), f(x.mean(1, keepdim=True)).expand_as(x))
    assert (layer(x) - f(x)).norm() > 0.1 * f(x).norm()


def test_sharp_routing_to_own_slots_is_the_dense_model_in_the_limit():
    """A slot for each token, pointing at it alone: the layer tends to the MLP as the scale grows."""
    dense = dense_model()
    start = upcycle(dense, 24, init="copy", blocks=[3])
    layer, f = start.model.encoder.blocks[3].mlp, dense.encoder.blocks[3].mlp
    x = 3.0 * torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64)).Q.unsqueeze(0)  # 24 tokens at right angles
    errors = []
    for scale in (5.0, 20.0, 80.0):
        layer.router.phi.data.copy_(x[0].T.unsqueeze(-1))
        layer.router.scale.data.fill_(scale)
        errors.append(float(((layer(x) - f(x)).norm() / f(x).norm()).detach()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-10


def test_tokens_choice_gives_the_gate_times_the_dense_output():
    """One choice and room for all: y = gate * f(x), so the output is smaller than the MLP's by the gate."""
    dense = dense_model()
    start = upcycle(dense, 3, init="copy", router="tokens_choice", capacity_factor=3.0, blocks=[1])
    x, f = tokens(dense, 1), dense.encoder.blocks[1].mlp
    layer = start.model.eval().encoder.blocks[1].mlp
    gate = (x @ layer.router.weight).softmax(-1).amax(-1, keepdim=True)
    torch.testing.assert_close(layer(x), gate * f(x), rtol=1e-10, atol=1e-10)
    assert "times a gate below 1" in str(start.distance)


def test_sharp_gates_of_tokens_choice_give_the_dense_model():
    """From the centers with room for all tokens, gates go to 1 and the layer to the MLP."""
    dense = dense_model()
    fresh = upcycle(dense, 3, init="copy", router="tokens_choice", capacity_factor=3.0, images=IMAGES)
    near = upcycle(dense, 3, router="tokens_choice", capacity_factor=3.0, images=IMAGES, init="centers")
    assert near.distance.features < 0.05 < fresh.distance.features


def test_places_that_tokens_tell_give_the_dense_model():
    """As many slots as tokens, and tokens that tell their place: the dense model; the class token has a slot too."""
    for pool in ("mean", "class"):
        dense = dense_model(pool, places=5.0)
        slots = dense.config.tokens
        near = upcycle(dense, slots, init="positions", images=IMAGES)
        fresh = upcycle(dense, slots, init="copy", images=IMAGES)
        assert max(near.distance.layers.values()) < 1e-3
        assert near.distance.features < 1e-3
        assert min(fresh.distance.layers.values()) > 0.3
        again = upcycle(dense, 2 * slots, init="positions", images=IMAGES)  # slots begin again: halves of the same
        assert again.distance.features < 1e-3


@pytest.mark.parametrize("slots", [(12, 1), (4, 2), (3, 1)])
def test_closest_is_no_farther_than_its_parts(slots):
    """One layer, so that all see the same tokens: refined, nearer than both ways; these nearer than fresh."""
    dense = dense_model()
    first = {
        init: upcycle(dense, *slots, init=init, images=IMAGES, blocks=[1]).distance.layers[1]
        for init in ("copy", "centers", "positions")
    }
    torch.manual_seed(0)
    closest = upcycle(dense, *slots, init="closest", images=IMAGES, blocks=[1]).distance.layers[1]
    assert closest < min(first["centers"], first["positions"])
    assert max(first["centers"], first["positions"]) < first["copy"]


def test_plain_logits_and_experts_choice_start_near_too():
    """Routers without normalization have their scale in the slot vectors."""
    dense = dense_model(places=5.0)
    for options in ({"normalize": False}, {"router": "experts_choice", "capacity_factor": 3.0}):
        fresh = upcycle(dense, 12, init="copy", images=IMAGES, **options)
        near = upcycle(dense, 12, init="closest", images=IMAGES, **options)
        assert max(near.distance.layers.values()) < 1e-3 < 0.1 < min(fresh.distance.layers.values())


def test_refining_never_makes_it_worse():
    """Where no step helps (the layer is the MLP already) the router stays as it was, without gradients."""
    dense = dense_model(places=5.0)
    start = upcycle(dense, 12, init="positions", images=IMAGES, blocks=[3])
    layer = start.model.encoder.blocks[3].mlp
    before = layer.router.phi.clone()
    with torch.no_grad():
        refine(layer, dense.encoder.blocks[3].mlp, tokens(dense, 3))
    after = upcycle_distance(dense, start.model)
    assert after <= start.distance.layers[3]
    assert torch.equal(layer.router.phi, before) or after < start.distance.layers[3]
    assert all(parameter.grad is None for parameter in start.model.parameters())


def upcycle_distance(dense: VisionTransformer, model: VisionTransformer) -> float:
    return distance(dense, model, IMAGES).layers[3]


def test_experts_are_copies_and_noise_parts_them():
    """Without noise all experts equal the MLP, bit for bit; with it they differ by that share of the deviation."""
    dense = dense_model()
    mlp = dense.encoder.blocks[2].mlp
    plain = upcycle(dense, 4, init="copy").model.encoder.blocks[2].mlp.experts
    for n in range(4):
        assert torch.equal(plain.w1[n], mlp.fc1.weight.T)
        assert torch.equal(plain.b2[n], mlp.fc2.bias)
    noisy = upcycle(dense, 4, init="copy", noise=0.1).model.encoder.blocks[2].mlp.experts
    moved = ((noisy.w1 - plain.w1).std() / mlp.fc1.weight.std()).detach()
    assert 0.08 < float(moved) < 0.12
    assert not torch.equal(noisy.w1[0], noisy.w1[1])


def test_a_share_of_the_units_is_drawn_anew():
    """With redraw=0.5 half of each expert's hidden units are the MLP's, the other half new, not the same for all."""
    dense = dense_model()
    mlp = dense.encoder.blocks[2].mlp
    experts = upcycle(dense, 4, init="copy", redraw=0.5).model.encoder.blocks[2].mlp.experts
    kept = (experts.w1 == mlp.fc1.weight.T).all(1) & (experts.w2 == mlp.fc2.weight).all(1)
    assert kept.sum(1).tolist() == [16] * 4
    assert not torch.equal(kept[0], kept[1])
    assert 0.5 < float((experts.w1[0][:, ~kept[0]].std() / mlp.fc1.weight.std()).detach()) < 2


@pytest.mark.parametrize("images", [None, IMAGES])
def test_experts_beside_keep_the_dense_model(images):
    """The default start is the dense model bit for bit, costs little more, and says so; its MLPs are the old ones."""
    dense = dense_model("class")
    start = upcycle(dense, 3, images=images)
    assert torch.equal(start.model(IMAGES), dense(IMAGES))
    assert (start.init, start.distance.features, start.distance.same_class) == ("beside", 0.0, 1.0)
    layer = start.model.encoder.blocks[3].mlp
    assert torch.equal(layer.mlp.fc1.weight, dense.encoder.blocks[3].mlp.fc1.weight)
    assert layer.experts.hidden_dim == 32 // 16
    assert start.params == sum(p.numel() for p in start.model.parameters()) / sum(p.numel() for p in dense.parameters())
    assert "experts of hidden width 2 beside the MLPs of blocks 2, 3" in str(start)
    assert "begin with an output of zero" in str(start)


def test_slots_beside_begin_sharp():
    """Routers beside an MLP that saw images give tokens back better than fresh ones: slots tell tokens apart."""
    dense = dense_model()
    x = tokens(dense, 2)

    def lost(model):
        routing = model.encoder.blocks[2].mlp.router(x)
        return float((routing.combine(routing.dispatch(x)) - x).norm().detach())

    assert lost(upcycle(dense, 6, images=IMAGES).model) < 0.9 * lost(upcycle(dense, 6).model)


def test_starts_compared():
    """Every start is tried and the nearest recommended; without images those that need none."""
    dense = dense_model()
    lines = []
    text = compare_starts(dense, 3, images=IMAGES, expert_dim=2, report=lines.append)
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == [
        "beside",
        "copy",
        "centers",
        "positions",
        "closest",
    ]
    assert text.endswith("recommended: beside, the nearest to the dense model on 16 images")
    assert any("block 2" in line for line in lines)
    assert "closest" not in compare_starts(dense, 3)


def test_all_else_is_kept():
    """Outside the MoE layers the weights are the dense model's, in its dtype and mode; the dense model is as it was."""
    dense = dense_model("attention")
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    model = upcycle(dense, 4, init="closest", images=IMAGES).model
    assert model.config.moe_blocks == (2, 3)
    assert not model.training
    state = model.state_dict()
    assert {name for name in before if name not in state} == {
        f"encoder.blocks.{i}.mlp.{part}.{kind}"
        for i in (2, 3)
        for part in ("fc1", "fc2")
        for kind in ("weight", "bias")
    }
    assert all(torch.equal(state[name], value) for name, value in before.items() if name in state)
    assert all(torch.equal(dense.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("naming", ["original", "timm"])
def test_from_other_peoples_weights(naming):
    """Arrays under foreign names, upcycled: the plain torch.nn model exactly where the router does not mix."""
    plain = PlainViT(gelu="none" if naming == "timm" else "tanh", depth=4)
    dense = (
        from_timm(timm_names(plain), heads=2, mean=0.5, std=0.5) if naming == "timm" else from_vit(flax_names(plain))
    )
    images = torch.randn(2, 3, *plain.image_size, dtype=torch.float64)
    model = upcycle(dense, 4, init="copy", router="identity").model
    torch.testing.assert_close(model(images), plain(images), rtol=1e-10, atol=1e-10)


def test_the_report_is_on_held_out_images():
    """Routers are fitted to some images and judged by others; a model in training mode is judged without dropout."""
    dense = VisionTransformer(ViTConfig(**{**SHAPE.__dict__, "dropout": 0.5})).double().train()
    fit, rest = IMAGES[::2], IMAGES[1::2]
    torch.manual_seed(0)
    start = upcycle(dense, 4, init="closest", images=fit, held_out=rest)
    assert start.distance == distance(dense, start.model, rest)
    assert start.distance.images == 8
    assert dense.training
    assert start.model.training


def test_distance_by_hand():
    """Means over the images of |a - b| / |b|, features and logits; the heads' share of equal classes."""
    dense = dense_model()
    model = upcycle(dense, 3, init="copy").model
    found = distance(dense, model, IMAGES)
    a, b = (m.forward_head(m.forward_features(IMAGES), pre_logits=True) for m in (model, dense))
    assert found.features == pytest.approx(float(((a - b).norm(dim=1) / b.norm(dim=1)).mean().detach()))
    assert found.same_class == float((model(IMAGES).argmax(1) == dense(IMAGES).argmax(1)).double().mean())
    x, layer, mlp = tokens(dense, 3), model.encoder.blocks[3].mlp, dense.encoder.blocks[3].mlp
    expected = ((layer(x) - mlp(x)).flatten(1).norm(dim=1) / mlp(x).flatten(1).norm(dim=1)).mean()
    assert found.layers[3] == pytest.approx(float(expected.detach()))
    assert "mixtures of tokens" in str(found)
    assert "random noise" in str(upcycle(dense, 3))


def test_mistakes():
    """Each with one sentence."""
    dense = dense_model()
    for call, words in (
        (lambda: upcycle(upcycle(dense, 2).model, 2), "has experts already"),
        (lambda: upcycle(dense, 2, init="best"), "init must be one of beside, copy, centers, positions, closest"),
        (lambda: upcycle(dense, 2, init="centers"), "give images="),
        (lambda: upcycle(dense, 2, blocks="odd"), "'last_half' or indices, got 'odd'"),
        (lambda: upcycle(dense, 2, blocks=[9]), "different indices from 0 to 3"),
        (lambda: upcycle(dense, 2, noise=-1), "noise must not be negative"),
        (lambda: upcycle(dense, 2, init="copy", redraw=2), "redraw is a share in"),
        (lambda: upcycle(dense, 2, redraw=0.5), "noise and redraw change copies"),
        (lambda: upcycle(dense, 2, init="copy", expert_dim=3), "leave out expert_dim"),
        (lambda: upcycle(dense, 2, slotz=3), "unknown option 'slotz'"),
        (lambda: upcycle(dense, 500, init="centers", images=IMAGES), "500 slots need at least as many tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_k_means_finds_separate_clusters():
    """Points around three directions: each direction is found, whatever the start."""
    torch.manual_seed(3)
    corners = torch.eye(6)[:3]
    points = torch.nn.functional.normalize(corners.repeat(40, 1) + 0.05 * torch.randn(120, 6), dim=1)
    found = {tuple(center.round().int().tolist()) for center in spherical_k_means(points, 8)}
    assert found == {tuple(corner.int().tolist()) for corner in corners}


def test_places_are_told_apart():
    """Tokens that are noise plus a vector of their place: the largest logit is the place's own."""
    torch.manual_seed(4)
    x = torch.randn(1, 9, 16, dtype=torch.float64) * 2 + torch.randn(50, 9, 16, dtype=torch.float64)
    directions = torch.nn.functional.normalize(place_directions(x, 9), dim=0)
    right = ((x @ directions).argmax(-1) == torch.arange(9)).double().mean()
    assert right > 0.9
