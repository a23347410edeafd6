"""Many ranks compute what one process computes: loss, output, every gradient, three optimizer steps."""

import pytest
import torch
from parallel import checks
from parallel.ranks import run_ranks

from softmoe.budget.plan import Layout, Plan, Settings

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
ROUTERS = ("soft", "tokens_choice", "experts_choice", "placed", "slots stay")
MESHES = {
    2: [(1, 1), (2, 1), (1, 2), (2, 2)],
    4: [(4, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2), (4, 4)],
}  # (expert, shard)
CASES = {  # all that are different on 2 ranks; on 4 the sparse routers, which use the same seam, on two meshes
    2: [(router, *mesh) for mesh in MESHES[2] for router in ROUTERS],
    4: [("soft", *mesh) for mesh in MESHES[4]]
    + [(router, *mesh) for mesh in ((2, 1), (2, 4)) for router in ROUTERS[1:]],
}


def assert_equal(outcomes: list[checks.Outcome], one: checks.Outcome) -> None:
    for ours in outcomes:
        assert ours.loss == pytest.approx(one.loss, rel=1e-12)
        assert ours.norm == pytest.approx(one.norm, rel=1e-10)
        assert ours.gradients.keys() == one.gradients.keys()
        assert ours.weights.keys() == one.weights.keys()
        for mine, reference in ((ours.gradients, one.gradients), (ours.weights, one.weights)):
            for name, value in reference.items():
                torch.testing.assert_close(
                    mine[name], value, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE
                )
    for field in ("output", "input_gradient"):
        joined = torch.cat([getattr(ours, field) for ours in outcomes])
        torch.testing.assert_close(joined, getattr(one, field), **TOLERANCE)


@pytest.mark.parametrize("world", [pytest.param(n, marks=[pytest.mark.slow] * (n > 2)) for n in CASES])
def test_ranks_compute_what_one_process_computes(world):
    """On 2 and 4 ranks, for the splits into experts, shards and copies, and for all three routers, to 1e-10."""
    by_rank = run_ranks(world, checks.train_cases, world, CASES[world])
    references = {router: checks.train_three_steps(checks.make_model(router)) for router in ROUTERS}
    for case in CASES[world]:
        one = references[case[0]]
        assert one.norm > 0.05, "the clip must be at work"
        assert_equal([outcomes[case] for outcomes in by_rank], one)


@pytest.mark.parametrize("world", [pytest.param(n, marks=[pytest.mark.slow] * (n > 2)) for n in (2, 3, 4)])
def test_ranks_start_as_one_process_does(world):
    """A model that is spread while it is built begins with the bits of one that is not; of its blocks no more than the
    newest is whole on any rank, and of its experts one: what is drawn at once is no more than the 192 numbers of
    attention, where an expert has 96 and all of a layer have 384. So do experts that start alike or beside an MLP."""
    forms: list[dict] = [{}, {"identical_init": True}, {"keep_mlp": True}]
    meshes = MESHES.get(world, [(1, 3)])  # three parts of four experts and of width 8 are uneven
    cases = [(mesh, form) for mesh in meshes for form in (forms if world == 2 else forms[:1])]
    for results in run_ranks(world, checks.start_on_ranks, cases):
        for (_, form), start in zip(cases, results, strict=True):
            reference = checks.fresh_model(**form).state_dict()
            assert start.weights.keys() == reference.keys()
            assert all(torch.equal(start.weights[name], value) for name, value in reference.items())
            assert start.whole_blocks == [1, 1, 1]
            assert start.drawn == 192


def test_halves_travel_while_experts_work():
    """When experts begin with either half, one exchange of the other half is under way: in both passes."""
    assert run_ranks(2, checks.work_while_travelling) == [([1, 1], [1, 1])] * 2


@pytest.mark.slow
def test_sent_bytes_are_those_of_the_plan():
    """What real ranks put through their collectives, counted, is what the planner says."""
    for counts in run_ranks(2, checks.count_sent, [(2, 1), (2, 2), (1, 2), (1, 1)]):
        for (expert, shard), sent in counts.items():
            settings = Settings(checks.BATCH, weight_bytes=8, activation_bytes=8)
            plan = Plan(checks.make_model("soft").config, Layout(2, expert, shard), settings).traffic()
            assert sent.get("all_to_all", 0) == plan.all_to_all
            assert sent.get("gather", 0) == pytest.approx(plan.gather, rel=0.05)  # shards that do not divide are padded
            assert sent.get("reduce", 0) == pytest.approx(plan.reduce, rel=0.05)


@pytest.mark.slow
def test_options_and_names():
    """Gradient checkpointing, frozen weights, the Identity router, dense models, slots exchanged in halves, parts
    compiled by themselves, Muon: equal too. The state dict has the names and shapes of one process, on every mesh."""
    results = run_ranks(2, checks.train_with_options, 2)
    for key in results[0]:
        assert_equal([result[key] for result in results], checks.with_option(key, checks.train_three_steps))
