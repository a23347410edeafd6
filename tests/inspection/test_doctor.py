"""Each check finds its illness, and nothing in a healthy model or run."""

import pytest
import torch
from making import pixels, tiny_model

from softmoe.accelerate.soft import keep_logits_only
from softmoe.data import to_tensor
from softmoe.inspection import correlation_summary, doctor, layer_results
from softmoe.inspection.doctor import (
    examine_history,
    examine_layers,
    examine_loading,
    examine_machine,
    examine_parameters,
)
from softmoe.moe.record import routers_by_layer


def layers_of(model):
    return layer_results(model, [to_tensor(pixels(6))])[1]


def wrong(verdicts):
    return [v.check for v in verdicts if v.wrong]


def parameters(model, tokens=16):
    found = {name: correlation_summary(router) for name, router in routers_by_layer(model).items()}
    return examine_parameters(found, model.config.moe.num_experts, tokens)


def set_scale(model, value):
    with torch.no_grad():
        for router in routers_by_layer(model).values():
            router.scale.fill_(value)
    return model


def test_healthy():
    """Nothing is wrong, and every verdict has a figure, a limit and advice."""
    model = set_scale(tiny_model(), 8.0)
    verdicts = examine_layers(layers_of(model)) + parameters(model)
    assert wrong(verdicts) == []
    assert all(v.wrong is False and v.figure and v.limit and v.advice for v in verdicts)
    assert [v.check for v in verdicts] == [
        "saturated dispatch",
        "saturated combine",
        "uniform dispatch",
        "dead slots",
        "expert collapse",
        "duplicate slots",
        "scale of the logits",
        "more experts than tokens",
    ]


def test_an_accelerated_model_gets_the_same_checks():
    """Fast classes that stand in for the routers take no check away."""
    model = set_scale(tiny_model(), 8.0)
    plain = [v.check for v in examine_layers(layers_of(model))]
    assert keep_logits_only(model)
    assert [v.check for v in examine_layers(layers_of(model))] == plain


def test_saturated_and_uniform():
    """A huge scale is one-hot, a tiny one uniform; both are out of range."""
    sharp = set_scale(tiny_model(), 1e4)
    assert {"saturated dispatch", "saturated combine"} <= set(wrong(examine_layers(layers_of(sharp))))
    assert wrong(parameters(sharp)) == ["scale of the logits"]
    flat = set_scale(tiny_model(), 1e-3)
    assert wrong(examine_layers(layers_of(flat))) == ["uniform dispatch"]
    assert wrong(parameters(flat)) == ["scale of the logits"]


def test_slots_with_a_place_may_take_one_token():
    """A strong place is no saturation, and slots that all average the whole image are still told of."""
    strong = set_scale(tiny_model(router="placed", place_init=1e3), 8.0)
    assert wrong(examine_layers(layers_of(strong))) == []
    apart = set_scale(tiny_model(router="placed", place_init=1e3, combine_place=False), 1e4)
    assert wrong(examine_layers(layers_of(apart))) == ["saturated combine"]
    weak = set_scale(tiny_model(router="placed", place_init=1e-4), 1e-3)
    assert wrong(examine_layers(layers_of(weak))) == ["uniform dispatch"]


def test_one_uniform_layer_is_no_illness():
    """The paper's own models have such last layers: wrong only if all are."""
    model = set_scale(tiny_model(), 8.0)
    with torch.no_grad():
        list(routers_by_layer(model).values())[-1].scale.fill_(1e-3)
    assert wrong(examine_layers(layers_of(model))) == []
    assert wrong(examine_layers(layers_of(tiny_model("uniform")))) == []  # it is meant to be uniform


def test_dead_slots_and_collapse():
    """All tokens ask for one slot."""
    layers = layers_of(set_scale(tiny_model(), 8.0))
    for r in layers.values():
        r["importance"] = r["importance"] | {"slots": [0.995, *[0.001] * 5], "effective_experts": 1.04}
    assert wrong(examine_layers(layers)) == ["dead slots", "expert collapse"]


def test_duplicate_and_lazy_slots():
    """Copies in other experts; second slots like the first; more experts than tokens."""
    model = tiny_model(slots_per_expert=2)
    routers = list(routers_by_layer(model).values())
    with torch.no_grad():
        routers[0].phi[:, 1] = routers[0].phi[:, 0]
        routers[1].phi[:, :, 1] = routers[1].phi[:, :, 0] * 2
    assert wrong(parameters(model, tokens=5)) == ["duplicate slots", "lazy second slots", "more experts than tokens"]


def test_dropped_tokens():
    """Room for half of the tokens drops the others; experts that sleep are named."""
    layers = layers_of(tiny_model("tokens_choice", capacity_factor=0.5))
    assert "dropped tokens" in wrong(examine_layers(layers))
    for r in layers.values():
        r["idle_experts"] = 0.5
    assert "idle experts" in wrong(examine_layers(layers))
    assert wrong(examine_layers(layers_of(tiny_model("identity")))) == []


@pytest.mark.parametrize(
    ("precision", "device", "works", "ill"),
    [
        ("bfloat16", "cpu", False, True),
        ("bfloat16", "cpu", True, False),
        ("bfloat16", "cuda", False, False),
        ("float32", "cpu", False, False),
    ],
)
def test_bfloat16(monkeypatch, precision, device, works, ill):
    """Only a bfloat16 that is used and does not work is wrong."""
    monkeypatch.setattr(doctor, "bfloat16_works", lambda: works)
    assert examine_machine(precision, device).wrong is ill


def course(count=40, **changes):
    """Lines of metrics of a run that goes well."""
    rows = [
        {
            "step": 10 * (i + 1),
            "loss": 3.0 / (i + 1) + 1,
            "grad_norm": 1.0 + 0.1 * (i % 3),
            "skipped_steps": 0,
            "images": 640 * (i + 1),
            "device_seconds": 6.4 * (i + 1),
            "routers": {"encoder.blocks.3.mlp": {"scale": 1.0 + 0.1 * i}},
        }
        for i in range(count)
    ]
    for row in rows:
        row |= {key: change(row) for key, change in changes.items()}
    return rows


def test_a_good_course():
    """Nothing is wrong; lines of evaluations between do not disturb."""
    rows = [line for row in course() for line in (row, {"step": row["step"], "val/top1": 0.5})]
    assert [(v.check, v.wrong) for v in examine_history(rows, 50)] == [
        ("skipped steps", False),
        ("gradient spikes", False),
        ("loss going up", False),
        ("scale drift", False),
    ]


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("skipped steps", {"skipped_steps": lambda row: row["step"] // 100}),
        ("gradient spikes", {"grad_norm": lambda row: 40.0 if row["step"] % 100 == 0 else 1.0}),
        ("loss going up", {"loss": lambda row: 2.0 + row["step"] / 100}),
        ("scale drift", {"routers": lambda row: {"a": {"scale": 1.0 if row["step"] < 100 else 99.0}}}),
        ("scale drift", {"routers": lambda row: {"a": {"scale": 1.0 if row["step"] < 100 else -1.0}}}),
    ],
)
def test_a_bad_course(check, changes):
    """Each illness is found, alone."""
    assert wrong(examine_history(course(**changes), 50)) == [check]


def test_gaps_and_short_courses():
    """Null losses (not finite), few lines or none: unknown, not wrong."""
    assert wrong(examine_history(course(grad_norm=lambda row: None if row["step"] == 200 else 1.0))) == []
    assert [v.wrong for v in examine_history(course(3))] == [False, None, None, False]
    assert [v.wrong for v in examine_history([])] == [None]
    dense = course(routers=lambda row: {})
    assert [v.check for v in examine_history(dense)] == ["skipped steps", "gradient spikes", "loss going up"]


def test_data_loading(monkeypatch):
    """The run's images per second against what the workers could read, by a clock that is set by hand."""
    clock = iter(range(1000))
    monkeypatch.setattr("softmoe.inspection.doctor.time.perf_counter", lambda: float(next(clock)))
    batches = dict.fromkeys(range(3))  # one second each
    for workers, batch, ill in ((1, 100, True), (1, 200, False), (4, 50, False), (0, 200, True), (0, 400, False)):
        assert examine_loading(course(), workers, batches, batch).wrong is ill, (workers, batch)
    assert examine_loading([], 1, batches, 8).wrong is None
    assert "install 'softmoe-vit[fast]'" in examine_loading(course(), 1, batches, 100).advice


def test_nearly_uniform_dispatch_is_told():
    """Slots that average most of the tokens even in the sharpest layer give every expert nearly the same input: the
    doctor says so, and what to compare with."""
    model = set_scale(tiny_model(), 2.0)
    layers = layers_of(model)
    assert all(0.8 < r["dispatch"]["effective_share"] < 0.98 for r in layers.values())
    found = next(v for v in examine_layers(layers) if v.check == "uniform dispatch")
    assert found.wrong
    assert "one expert" in found.advice
