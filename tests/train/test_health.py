import math
import re
from itertools import combinations

import pytest
import torch

from softmoe.moe import PlacedRouter, Router, Routing, SoftRouter, TokensChoiceRouter
from softmoe.train.health import SATURATED, HealthWatch, mean_cosine, model_health


def numbers_of(router: Router, routing: Routing) -> dict[str, float]:
    return model_health({"layer": router}, {"layer": routing})["layer"]


def test_soft_numbers():
    """Scale, mean largest weights and slot similarity, against plain loops."""
    torch.manual_seed(0)
    router = SoftRouter(8, 3, 2)
    routing = router(torch.randn(2, 5, 8))
    numbers = numbers_of(router, routing)
    dispatch, combine = routing.dispatch_weights, routing.combine_weights
    largest = [dispatch[b, :, n, p].max().item() for b in range(2) for n in range(3) for p in range(2)]
    assert numbers["max_dispatch"] == pytest.approx(sum(largest) / 12)
    largest = [combine[b, m].max().item() for b in range(2) for m in range(5)]
    assert numbers["max_combine"] == pytest.approx(sum(largest) / 10)
    assert numbers["scale"] == 1.0
    slots = router.phi.detach().flatten(1).T
    cosines = [torch.cosine_similarity(a, b, dim=0).item() for a, b in combinations(slots, 2)]
    assert numbers["slot_similarity"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-6)


def test_sparse_numbers():
    """Equal tokens all choose one expert with one slot: all but one are dropped and N - 1 experts are idle."""
    router = TokensChoiceRouter(4, 4, capacity_factor=0.5).eval()
    numbers = numbers_of(router, router(torch.ones(1, 8, 4)))
    assert numbers == {"drop_rate": 7 / 8, "idle_experts": 3 / 4, "max_load": 1.0}


def test_mean_cosine_of_one_slot_is_zero():
    """There is no pair."""
    assert mean_cosine(torch.ones(3, 1)).item() == 0.0


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"max_dispatch": 0.99, "scale": 80.0}, r"dispatch is saturated.*scale 80"),
        ({"max_combine": 0.99}, "combine is saturated"),
        ({"slot_similarity": 0.99}, "collapsed"),
        ({"drop_rate": 0.8}, "80% of the tokens reach no expert"),
        ({"idle_experts": 0.75}, "75% of the experts get no token"),
    ],
)
def test_each_illness_is_told_once(numbers: dict[str, float], words: str):
    """A warning comes once, not at every line, and again after the layer has recovered."""
    watch = HealthWatch()
    healthy = dict.fromkeys(numbers, 0.1)
    first = watch.warnings({"blocks.3.mlp": numbers})
    assert len(first) == 1
    assert re.search(words, first[0])
    assert watch.warnings({"blocks.3.mlp": numbers}) == []
    assert watch.warnings({"blocks.3.mlp": healthy}) == []
    assert len(watch.warnings({"blocks.3.mlp": numbers})) == 1


def test_a_fresh_router_is_healthy():
    """No warning at the start of training, at any usual size."""
    torch.manual_seed(0)
    router = SoftRouter(64, 16, 2)
    numbers = numbers_of(router, router(torch.randn(2, 32, 64)))
    assert HealthWatch().warnings({"layer": numbers}) == []
    assert all(math.isfinite(value) for value in numbers.values())


def test_slots_on_one_token_each_are_healthy_where_they_have_a_place():
    """A strong place gives each of sixteen slots its own of sixteen tokens, which is what it was asked for."""
    router = PlacedRouter(8, 16, place_init=100.0)
    numbers = numbers_of(router, router(torch.randn(2, 16, 8), None, (4, 4)))
    assert numbers["max_dispatch"] > SATURATED
    assert numbers["place_width"] == pytest.approx(1 / 40)
    assert HealthWatch().warnings({"layer": numbers}) == []


@pytest.mark.parametrize("combine_place", [True, False])
def test_one_slot_for_each_token_is_healthy_only_if_places_count_in_combine(combine_place: bool):
    """Content alone that sends each token to one slot is saturated, whatever the places of slots say of dispatch."""
    router = PlacedRouter(8, 16, combine_place=combine_place)
    numbers = numbers_of(router, router(torch.randn(2, 16, 8), None, (4, 4))) | {"max_combine": 0.99}
    warnings = HealthWatch().warnings({"layer": numbers})
    assert [("combine is saturated" in text) for text in warnings] == ([] if combine_place else [True])
