"""The planner: its formulas against a trace of the real step, and its choices against the limits it was given."""

import json
from dataclasses import replace

import pytest
from parallel.dry_run import trace_all
from routers import moe_of

from softmoe.budget.plan import DEVICES, Layout, Plan, Settings, best_plan, layouts, most_experts, plans
from softmoe.budget.report import plan_report
from softmoe.cli.cost import parse_bytes, plan_command
from softmoe.models import ViTConfig, model_config

A100 = DEVICES["a100-40"]


def small(router: str = "soft", **more) -> ViTConfig:
    moe = moe_of(router, num_experts=8, slots_per_expert=4, **more)
    return ViTConfig(image_size=64, patch_size=8, width=128, depth=4, mlp_dim=512, heads=4, num_classes=64, moe=moe)


CASES = [  # model, (world, expert, shard), images per rank, checkpointing
    (small(), (8, 8, 8), 32, False),
    (small(), (8, 4, 8), 32, False),
    (small(), (8, 4, 2), 32, True),
    (small(), (8, 8, 1), 32, False),
    (replace(small(), moe=None), (4, 1, 4), 32, False),
    (small("experts_choice"), (8, 2, 8), 32, False),
]


@pytest.mark.slow
def test_agrees_with_a_trace_of_the_real_step():
    """Every byte that one of many ranks keeps and sends; the peak to a tenth (or above it, with recomputation)."""
    for (config, sizes, images, again), traced in zip(CASES, trace_all(CASES), strict=True):
        settings = Settings(images * sizes[0], activation_bytes=4, checkpointing=again)
        plan = Plan(config, Layout(*sizes), settings)
        need, sent = plan.memory(), plan.traffic()
        where = f"{sizes}, checkpointing {again}"
        assert need.weights == pytest.approx(traced.weights, rel=0.01), where  # parts that do not divide are padded
        assert need.gradients == pytest.approx(traced.gradients, rel=0.01), where
        assert need.optimizer == pytest.approx(traced.optimizer, rel=0.01), where
        assert sent.all_to_all == traced.sent.get("all_to_all", 0), where
        assert sent.gather == pytest.approx(traced.sent.get("gather", 0), rel=0.02), where
        assert sent.reduce == pytest.approx(traced.sent.get("reduce", 0), rel=0.02), where
        assert 0.9 * traced.peak < need.peak < (1.3 if again else 1.1) * traced.peak, where


@pytest.mark.parametrize("devices", [1, 6, 8, 48])
def test_layouts_are_those_that_can_be_made(devices):
    """The planner offers exactly what softmoe.parallel accepts."""
    config = model_config("soft_s16_128e")
    assert config.moe is not None
    for expert in range(1, devices + 1):
        for shard in range(1, devices + 1):
            layout = Layout(devices, expert, shard)
            try:
                layout.check()
                if expert > 1:
                    layout.check_experts(config.moe.num_experts, config.width, config.mlp_dim)
                possible = True
            except ValueError:
                possible = False
            assert (layout in layouts(config, devices)) == possible, layout


def test_one_device_is_memory():
    """On one device nothing is sent and nothing is buffered."""
    plan = Plan(small(), Layout(1), Settings(8, activation_bytes=4))
    assert plan.buffers() == 0
    assert plan.traffic() == type(plan.traffic())(0, 0, 0)
    assert set(plan.step_seconds(A100)) == {"products", "exchange", "other links", "update"}
    assert plan.step_seconds(A100)["exchange"] == plan.step_seconds(A100)["other links"] == 0.0


def test_best_fits_and_more_memory_is_not_slower():
    """The choice is within the memory, and the fastest of those within it."""
    candidates = plans(model_config("soft_h14_256e"), 256, Settings(4096))
    speeds = []
    for memory in (5e9, 10e9, 20e9, 80e9):
        hardware = replace(A100, memory=memory)
        best = best_plan(candidates, hardware)
        if best is None:
            continue
        assert best.memory().peak <= memory
        speeds.append(best.seconds(hardware))
    assert len(speeds) >= 2
    assert speeds == sorted(speeds, reverse=True)


def test_most_experts():
    """More memory takes more experts; a dense model has none."""
    config, settings = model_config("soft_s16_128e"), Settings(256)
    few = most_experts(config, 4, settings, replace(A100, memory=8e9))
    many = most_experts(config, 4, settings, A100)
    assert few is not None
    assert many is not None
    assert 0 < few < many
    assert most_experts(model_config("vit_s16"), 4, settings, A100) is None


def test_most_experts_share_the_slots_of_the_model():
    """The answer is the largest power of two that fits with as many slots in all as the model has."""
    config, settings = small(), Settings(1024)  # 8 experts x 4 slots
    assert config.moe is not None
    needed = {}
    for number in (1, 2, 4, 8, 16, 32):
        moe = config.moe.change(num_experts=number, slots_per_expert=32 // number)
        needed[number] = min(plan.memory().peak for plan in plans(replace(config, moe=moe), 4, settings))
    for number, more in ((0, 1), (8, 16), (16, 32)):  # just too little for the next one
        hardware = replace(A100, memory=needed[more] - 1)
        assert most_experts(config, 4, settings, hardware) == number


def test_wrong_input():
    """One sentence each."""
    with pytest.raises(ValueError, match="a batch of 100 images cannot be shared evenly by 8 devices"):
        plans(small(), 8, Settings(100))
    with pytest.raises(ValueError, match="devices must be at least 1"):
        plans(small(), 0, Settings(8))
    for text in ("40", "GB", "-1GB", "40XB"):
        with pytest.raises(ValueError, match="--memory must be"):
            parse_bytes(text)
    assert parse_bytes("40GB") == 40e9
    assert parse_bytes("1.5 GiB") == 1.5 * 2**30


def test_nothing_fits():
    """The report says how much the smallest layout needs."""
    hardware = replace(A100, memory=1e6)
    text = plan_report("tiny", plans(small(), 2, Settings(8)), hardware, 0)
    assert "No layout fits. The smallest needs" in text


def test_command(capsys):
    """Text for people, JSON for programs; both with the best layout."""
    arguments = ["soft_s16_128e", "--devices", "8", "--memory", "40GB", "--batch", "1024"]
    assert plan_command(arguments) == 0
    text = capsys.readouterr().out
    assert "Best: --parallel.expert" in text
    assert "Assumed: a100-40" in text
    assert max(map(len, text.splitlines())) <= 100
    assert plan_command([*arguments, "--json", "--interconnect", "50"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["hardware"]["between"] == 50e9
    assert values["best"]["memory"]["peak"] <= 40e9
