"""Recording keeps what the routers decide and leaves no trace."""

import pytest
import torch

from softmoe.inspection import record
from softmoe.models import create_model
from softmoe.moe import DenseRouting, SoftMoE, SparseRouting

ROUTERS = {
    "soft": DenseRouting,
    "placed": DenseRouting,
    "tokens_choice": SparseRouting,
    "experts_choice": SparseRouting,
    "identity": SparseRouting,
    "uniform": DenseRouting,
    "soft_uniform": DenseRouting,
    "uniform_soft": DenseRouting,
}


def small(router="soft", **changes):
    options = {"image_size": 16, "width": 16, "depth": 4, "heads": 2, "mlp_dim": 16, "num_classes": 3} | changes
    return create_model(f"{router}_ti4_4e", **options).eval()


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_is_seen(router):
    """Each MoE layer's routing is there, in the model's order; the output is the same to the bit."""
    model, images = small(router), torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        plain = model(images)
        with record(model) as recording:
            recorded = model(images)
    assert list(recording.routings) == ["encoder.blocks.2.mlp", "encoder.blocks.3.mlp"]
    assert all(isinstance(routing, ROUTERS[router]) for routing in recording.routings.values())
    assert torch.equal(plain, recorded)
    assert hooks(model) == 0


def test_what_is_kept_is_what_the_layer_used():
    """The kept routing, applied by hand, gives the layer's output."""
    layer, x = SoftMoE(8, 3, 2).eval(), torch.randn(2, 5, 8)
    with record(layer) as recording:
        y = layer(x)
    routing = recording.routings["moe"]
    assert torch.equal(routing.combine(layer.experts(routing.dispatch(x))), y)


def test_the_last_pass_stays():
    """A second pass replaces the first; clear lets go."""
    layer = SoftMoE(8, 3).eval()
    with record(layer) as recording:
        layer(torch.randn(2, 5, 8))
        layer(torch.randn(4, 7, 8))
        assert recording.routings["moe"].dispatch_weights.shape == (4, 7, 3, 1)
        recording.clear()
        assert not recording.routings
        layer(torch.randn(1, 2, 8))
    layer(torch.randn(3, 3, 8))
    assert recording.routings["moe"].dispatch_weights.shape == (1, 2, 3, 1)


def test_nested_and_broken():
    """An inner recording ends alone; an exception leaves no hook behind."""
    model, images = small(), torch.randn(1, 3, 16, 16)
    with record(model) as outer:
        with record(model) as inner:
            model(images)
        first = inner.routings["encoder.blocks.2.mlp"]
        assert outer.routings["encoder.blocks.2.mlp"] is first
        model(images)
        assert inner.routings["encoder.blocks.2.mlp"] is first
        assert outer.routings["encoder.blocks.2.mlp"] is not first
    with pytest.raises(ZeroDivisionError), record(model):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="expected images"), record(model):
        model(torch.randn(1, 2, 16, 16))
    assert hooks(model) == 0


def test_a_dense_model_has_nothing_to_record():
    """A model without experts runs, and nothing is kept."""
    model = create_model("vit_ti4", image_size=8, width=8, depth=1, heads=1, mlp_dim=8, num_classes=2)
    with record(model) as recording:
        model(torch.randn(1, 3, 8, 8))
    assert recording.routers == recording.routings == {}
