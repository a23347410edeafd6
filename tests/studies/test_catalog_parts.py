"""What several studies compute: frontiers, leads at equal cost, settings that are equal for equal models."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softmoe.budget import cost
from softmoe.recipes import load
from softmoe.studies import LabOptions
from softmoe.studies.catalog import (
    ablations,
    bpr,
    collapse,
    controls,
    experts_slots,
    long_runs,
    pareto,
    placement,
    slots,
)
from softmoe.studies.driver import cells_of
from softmoe.studies.figures import bars, finish, frontier, panels, waterfall
from softmoe.studies.jobs import Training, key_of, price
from softmoe.studies.lab import make_lab
from softmoe.studies.results import Interval, Row, Table, costs

POINTS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1)


@given(POINTS)
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    """By plain comparison of all pairs: a point is on it if no other is at least as good and better in one way."""
    plain = {
        p
        for p in points
        if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)
    }  # fmt: skip
    assert frontier(points) == sorted(plain)


def test_the_lead_is_taken_at_equal_cost() -> None:
    """On a line in the logarithm of the cost; points that cost less or more than the line are left out."""
    line = [(1.0, 10.0), (100.0, 30.0)]
    assert pareto.mean_gap(line, [(10.0, 15.0)]) == 5.0
    assert pareto.mean_gap(line, [(10.0, 15.0), (1.0, 11.0), (0.5, 0.0), (1e9, 0.0)]) == 2.0
    assert pareto.mean_gap(line, [(1000.0, 1.0)]) is None
    assert pareto.mean_gap(line[:1], [(1.0, 1.0)]) is None


def test_the_lead_goes_seed_by_seed() -> None:
    """Two seeds whose level differs have the same lead; time is that of the one thread where it is known."""
    rows = [
        Row({"router": router, "model": name}, seed, {"top1": quality + 5.0 * seed, "tflops": cost, "seconds": 9.0})
        for router, name, cost, quality in (
            ("soft", "a", 1.0, 10.0),
            ("soft", "b", 4.0, 12.0),
            ("dense", "a", 2.0, 9.0),
        )
        for seed in range(2)
    ]
    assert pareto.lead(Table(tuple(rows)), "dense", "tflops", "top1") == {0: 2.0, 1: 2.0}
    assert pareto.time_of({"seconds": 9.0, "cpu_seconds": 3.0}) == 3.0


def test_equal_models_are_one_run() -> None:
    """However a study says it, one slot per expert, K = 1 and the base's width are the same settings."""
    lab = make_lab(LabOptions(scale="small"))

    def key(*args: str, **named: object) -> str:
        return key_of(Training(lab.config(*args, **named)))  # pyright: ignore[reportArgumentType]

    assert key("soft") == key("soft", num_experts=16, slots_per_expert=1, normalize=True, width=32)
    assert key("tokens_choice") == key("tokens_choice", top_k=1, capacity_factor=1.0, batch_priority=True)
    assert key("soft") != key("soft", scale_init=1.0)
    assert key("soft", num_experts=128) != key("soft")


def test_the_number_of_steps_may_be_chosen() -> None:
    """Warm-up, checkpoints and log go with it; the scale's own number changes nothing."""
    assert make_lab(LabOptions(scale="small", steps=900)).base == make_lab(LabOptions(scale="small")).base
    base = make_lab(LabOptions(scale="small", steps=5)).base
    assert (base.steps, base.schedule.warmup, base.checkpoint.every, base.log.every) == (5, 0, 2, 1)


def test_studies_share_runs() -> None:
    """At scale small the studies that are run together have far fewer runs than cells."""
    lab = make_lab(LabOptions(scale="small"))
    cells = [cell for study in (ablations, bpr, pareto, experts_slots) for cell in study.cells(lab)]
    assert len({key_of(cell.job) for cell in cells}) < len(cells) - 10


def test_printed_numbers_are_read_from_the_tables() -> None:
    """A few by hand: the paper's Table 2, Table 8 and Table 4."""
    assert ablations.printed()["10shot"] == {
        "soft": 74.8, "soft_uniform": 72.0, "uniform_soft": 71.8, "uniform": 70.0, "identity": 69.1, "dense": 62.3,
    }  # fmt: skip
    assert [round(g, 1) for g in bpr.gain(1, "10shot")] == [4.4, 4.7]
    assert round(placement.lead("soft", placement.LAST, "10shot"), 1) == 1.7
    assert len(pareto.printed("soft", "tflops", "10shot")) == 18


def test_places_without_enough_slots_are_left_out() -> None:
    """A Soft MoE has at least one slot per expert; a sparse router chooses at most all experts."""
    lab = make_lab(LabOptions(scale="small"))
    assert experts_slots.config_of(lab, "soft", 64, 1) is None
    found = experts_slots.config_of(lab, "soft", 4, 4)
    assert found is not None
    assert found.model.options["slots_per_expert"] == 16
    assert experts_slots.config_of(lab, "tokens_choice", 2, 4) is None


def test_controls_take_one_thing_away_at_a_time() -> None:
    """All models of the study have the same slots, blocks and first scale; only the named part differs."""
    lab = make_lab(LabOptions(scale="small"))
    shapes = {c.labels["method"]: c.job.config.model.resolve(10, lab.image_size) for c in controls.cells(lab)}  # pyright: ignore[reportAttributeAccessIssue]
    moe = {method: shape.moe for method, shape in shapes.items()}
    for method in controls.RATES:
        assert moe.pop(method) is None
    assert {layer.num_experts for method, layer in moe.items() if "one" not in method and " " not in method} == {16}
    assert shapes["placed one"].moe.num_experts == 1
    for router, ladder in (("soft", ("one", "4 experts")), ("placed", ("placed one", "4 placed experts"))):
        prices = [cost(shapes[method]) for method in (*ladder, router)]
        assert len({price.forward_flops for price in prices}) == 1
        assert prices[0].params < prices[1].params < prices[2].params


def test_every_comparison_with_dense_has_its_controls() -> None:
    """Each study that trains a dense model beside Soft MoE trains one expert with the same slots beside them, and says
    what experts give; a dense model beside has a fifth more FLOPs."""
    lab = make_lab(LabOptions(scale="small", recipe="quickstart", seeds=1))
    soft = Training(lab.config("soft")).flops()
    for study in (ablations, controls, experts_slots, long_runs, pareto, placement, slots):
        cells = list(study.cells(lab))
        trained = [cell for cell in cells if cell.labels.get("what") != "speed"]
        jobs = {
            key_of(getattr(cell.job, "parent", cell.job)): getattr(cell.job, "parent", cell.job) for cell in trained
        }
        shapes = [job.config.model.resolve(10, lab.image_size) for job in jobs.values()]  # pyright: ignore[reportAttributeAccessIssue]
        assert any(shape.moe is None for shape in shapes)
        assert any(shape.moe and shape.moe.num_experts == 1 for shape in shapes)
        numbers = {"top1": 1.0, "val_loss": 1.0, "tflops": 1.0, "seconds": 1.0, "images_per_second": 1.0}
        table = Table(tuple(Row(cell.labels, cell.seed, numbers) for cell in cells))
        said = [claim.text for claim in study.claims(table)]
        assert any("what experts give" in text for text in said), study
        assert study is pareto or any("what slots give" in text for text in said), study
    assert Training(lab.dense()).flops() / soft == pytest.approx(1.2, rel=1e-3)


def test_merged_tokens_are_a_control_where_slots_are_fewer() -> None:
    """A step of the dense model with merged tokens costs what Soft MoE's costs, to the nearest number of tokens."""
    assert make_lab(LabOptions(scale="small", recipe="quickstart")).merged() is None
    for lab in (
        make_lab(LabOptions(scale="small", recipe="small_data", data="shapes?size=64")).combining(),
        make_lab(LabOptions(scale="small", slots=4)),
    ):
        merged = lab.merged()
        assert merged is not None
        assert price(merged).train_flops == pytest.approx(price(lab.config("soft")).train_flops, rel=0.03)
        assert "merged" in {cell.labels["method"] for cell in controls.cells(lab)}
        assert Training(merged).flops() / Training(lab.config("soft")).flops() == pytest.approx(1.2, rel=1e-3)


def test_the_ladder_of_experts_at_more_slots() -> None:
    """With 64 slots there are 1, 4, 16 and 64 experts at equal FLOPs, for the paper's layer and with a place."""
    lab = make_lab(LabOptions(scale="small", recipe="quickstart", slots=64, seeds=1))
    found = {c.labels["method"]: c.job.config for c in controls.cells(lab)}  # pyright: ignore[reportAttributeAccessIssue]
    for ladder in (
        ("one", "4 experts", "16 experts", "soft"),
        ("placed one", "4 placed experts", "16 placed experts", "placed"),
    ):
        shapes = [found[method].model.resolve(1000, 32) for method in ladder]
        assert [shape.moe.num_experts for shape in shapes] == [1, 4, 16, 64]
        assert len({cost(shape).train_flops for shape in shapes}) == 1
    assert found["identity"].model.resolve(1000, 32).moe.num_experts == 16


def test_the_dense_model_is_the_best_of_its_rates() -> None:
    """Claims and figure see one dense model, at the rate with the highest mean accuracy."""
    levels = {
        "dense": (50.0, 40.0),
        "dense half rate": (44.0, 44.0),
        "dense twice rate": (47.0, 45.0),
        "one": (60.0, 60.0),
    }
    rows = [Row({"method": m}, seed, {"top1": level[seed]}) for m, level in levels.items() for seed in range(2)]
    table = controls.tuned(Table(tuple(rows)))
    assert table.distinct("method") == ["dense", "one"]
    assert table.where(method="dense").values("top1") == {0: 47.0, 1: 45.0}


def test_costs_are_shares_of_soft_moe() -> None:
    """A line for each method; what was not measured is a dash."""
    rows = [
        Row({"method": "soft"}, 0, {"top1": 50.0, "val_loss": 1.0, "tflops": 2.0, "cpu_seconds": 4.0}),
        Row({"method": "dense"}, 0, {"top1": 40.0, "val_loss": 2.0, "tflops": 3.0}),
    ]
    *_, soft, dense = costs(Table(tuple(rows))).splitlines()
    assert soft == "| Soft MoE | 50.00 | 1.00 | 1.00 | 1.00 |"
    assert dense == "| dense | 40.00 | 2.00 | 1.50 | - |"


def test_waterfall_adds_up() -> None:
    """The floating bars lead from the first model's level to the last one's, each by the difference of two models."""
    levels = {"dense": 50.0, "one": 60.0, "soft": 55.0}
    rows = [Row({"method": m}, seed, {"top1": level + seed}) for m, level in levels.items() for seed in range(3)]
    path = [Table(tuple(rows)).where(method=method) for method in levels]
    drawing, axes = panels(1, 1)
    waterfall(axes[0][0], ["dense", "+ slots", "+ experts", "Soft MoE"], path, "top1")
    first, last, slots, experts = axes[0][0].patches
    assert (slots.get_x(), slots.get_width()) == (51.0, 10.0)
    assert (experts.get_x(), experts.get_width()) == (61.0, -5.0)
    assert (first.get_x() + first.get_width(), last.get_x() + last.get_width()) == (51.0, 56.0)
    drawing.clear()


def test_places_follow_the_depth() -> None:
    """Studied on a recipe, experts are put into the blocks that its model has."""
    assert placement.places(make_lab(LabOptions(scale="small"))) == {
        "last": (3,), "one before last": (2,), "two last": (2, 3), "two spread": (1, 3), "all": (0, 1, 2, 3),
    }  # fmt: skip
    three = placement.places(make_lab(LabOptions(scale="small", recipe="quickstart")))
    assert (three["two last"], three["two spread"]) == ((1, 2), (0, 2))


@pytest.mark.parametrize("study", [ablations, collapse, experts_slots, long_runs, pareto, placement, slots])
def test_the_papers_studies_are_of_layers_that_combine(study) -> None:
    """Studies of routing take layers that combine, also of a recipe whose slots stay: models differ in one thing."""
    lab = make_lab(LabOptions(scale="small", recipe="small_data", data="shapes?size=64", seeds=1))
    jobs = [getattr(cell.job, "parent", cell.job) for cell in cells_of(study, lab)]
    shapes = [job.config.model.resolve(10, 64) for job in jobs if isinstance(job, Training)]
    layers = [shape.moe for shape in shapes if shape.moe]
    assert layers
    assert not any(layer.slots_stay for layer in layers)


def test_controls_of_a_recipe_whose_slots_stay() -> None:
    """Soft MoE stands beside fewer experts whose slots stay too, and beside the dense model with tokens merged into as
    many, after the same block, for 1.2 times its FLOPs; what cannot stay is left out."""
    lab = make_lab(LabOptions(scale="small", recipe="small_data", data="shapes?size=64", seeds=1))
    cells = cells_of(controls, lab)
    configs = {cell.labels["method"]: cell.job.config for cell in cells}  # pyright: ignore[reportAttributeAccessIssue]
    shapes = {method: config.model.resolve(10, 64) for method, config in configs.items()}
    assert not {"identity", "uniform", "uniform_soft", "soft_uniform"} & shapes.keys()
    assert {"one", "placed one", "4 experts", "soft", "placed", "merged"} <= shapes.keys()
    assert all(shape.moe.slots_stay for shape in shapes.values() if shape.moe)
    assert shapes["merged"].merge == (1, 16)
    assert shapes["merged"].tokens_by_block == shapes["placed"].tokens_by_block == (64, 64, 16, 16, 16)
    flops = [Training(configs[method]).flops() for method in ("merged", "soft")]
    assert flops[0] / flops[1] == pytest.approx(1.2, rel=1e-3)
    numbers = {"top1": 1.0, "val_loss": 1.0, "tflops": 1.0, "seconds": 1.0, "images_per_second": 1.0}
    table = Table(tuple(Row(cell.labels, cell.seed, numbers) for cell in cells))
    said = [claim.text for claim in controls.claims(table)]
    assert any("above merged tokens" in text for text in said)
    assert not any("dispatch" in text or "combine" in text or "mixing" in text for text in said)
    assert controls.figure(table, lab) is not None


def test_a_lab_around_a_recipe() -> None:
    """The dense twin has no experts and everything else of the recipe; soft experts are the recipe's own."""
    config, lab = load("quickstart"), make_lab(LabOptions(scale="small", recipe="quickstart", seeds=2))
    size = config.data.transform.image_size
    assert lab.base.model.resolve(7, size) == replace(config.model.resolve(7, size), moe=None)
    assert lab.config("placed").model.resolve(7, size) == config.model.resolve(7, size)
    placed = make_lab(LabOptions(scale="small", data="shapes?size=64", recipe="small_data")).config("placed").model
    assert placed.resolve(7, 64) == load("small_data").model.resolve(7, 64)  # its place_init is not the usual one
    uniform = lab.config("uniform").model.resolve(7, size).moe
    assert uniform is not None
    assert not uniform.identical_init
    assert (lab.base.steps, lab.base.optim, lab.seeds, lab.slots) == (config.steps, config.optim, 2, 16)
    assert make_lab(LabOptions(scale="small", data="shapes", steps=5, recipe="quickstart")).base.data.train == "shapes"
    with pytest.raises(ValueError, match="has no soft experts"):
        make_lab(LabOptions(scale="small", recipe="quickstart_dense"))


@pytest.mark.parametrize(("text", "most"), [("validation top-1 (%)", 100.0), ("training TFLOPs", 110.0)])
def test_shares_have_no_ticks_above_all(text: str, most: float) -> None:
    """Where accuracy is nearly 100 % the room for words behind it has no ticks; other numbers go on."""
    drawing, ((axis,),) = panels(1, 1, 4, 3)
    bars(axis, [("one", Interval(99.0, 12.0, 3)), ("two", Interval(60.0, 1.0, 3))], "black")
    finish(axis, text, "")
    drawing.canvas.draw()
    left, right = axis.get_xlim()
    assert right > 110
    assert max(tick for tick in axis.get_xticks() if tick <= right) == most
    assert len([tick for tick in axis.get_xticks() if left <= tick <= most]) > 2
