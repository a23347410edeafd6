"""The health of the routers in a few numbers per layer, and warnings when one goes wrong.

Letters: B images, M tokens, D width, N experts, P slots per expert.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from softmoe.moe import DenseRouting, NotCombined, PlacedRouter, Router, Routing, SoftRouter, SparseRouting
from softmoe.parallel import whole

# limits above which a run warns while it goes on; those of softmoe doctor are stricter
SATURATED = 0.95  # mean largest weight above which a softmax passes one entry only
COLLAPSED = 0.95  # mean cosine of the slot vectors above which all slots take the same tokens
DROPPED = 0.5
IDLE = 0.5


@torch.no_grad()
def router_health(router: Router, routing: Routing) -> dict[str, Tensor]:
    """Return the numbers of one layer by name, in one pass over its weights."""
    numbers: dict[str, Tensor] = {}
    if isinstance(router, PlacedRouter):
        numbers["place_width"] = whole(router.place.log_width.detach()).float().exp().mean()
        numbers["combine_place"] = torch.full_like(numbers["place_width"], router.combine_place)
    if isinstance(routing, DenseRouting):
        numbers["max_dispatch"] = routing.dispatch_weights.amax(1).mean()
        if not isinstance(routing, NotCombined):
            numbers["max_combine"] = routing.combine_weights.flatten(2).amax(2).mean()
    elif isinstance(routing, SparseRouting):
        real = routing.mask_T.sum().clamp(min=1)
        numbers["drop_rate"] = routing.dropped.sum() / real
        numbers["idle_experts"] = (routing.load == 0).float().mean()
        numbers["max_load"] = routing.load.max() / routing.load.sum().clamp(min=1)
    if isinstance(router, SoftRouter):
        if router.scale is not None:
            numbers["scale"] = router.scale.detach()
        numbers["slot_similarity"] = mean_cosine(whole(router.phi.detach()).flatten(1))
    return numbers


def mean_cosine(vectors_DS: Tensor) -> Tensor:
    """Return the mean cosine of all pairs of different columns, from the length of their sum: no S x S matrix."""
    S = vectors_DS.shape[1]
    if S < 2:
        return vectors_DS.new_zeros(())
    wide_DS = vectors_DS.double() if vectors_DS.device.type == "cpu" else vectors_DS.float()
    unit_DS = torch.nn.functional.normalize(wide_DS, dim=0)
    return (unit_DS.sum(1).square().sum() - S) / (S * (S - 1))


def model_health(routers: Mapping[str, Router], routings: Mapping[str, Routing]) -> dict[str, dict[str, float]]:
    """Return the numbers of each layer by its name, read together so that a GPU is waited for once."""
    found = {name: router_health(routers[name], routing) for name, routing in routings.items()}
    flat = [value for numbers in found.values() for value in numbers.values()]
    if not flat:
        return {name: {} for name in found}
    wide = torch.float64 if flat[0].device.type == "cpu" else torch.float32
    values = iter(torch.stack([value.to(wide) for value in flat]).tolist())
    return {name: {key: next(values) for key in numbers} for name, numbers in found.items()}


class HealthWatch:
    """Turns health numbers into warnings: each once, and again only after the layer has recovered."""

    def __init__(self) -> None:
        self._ill: set[tuple[str, str]] = set()

    def warnings(self, health: Mapping[str, Mapping[str, float]]) -> list[str]:
        messages = []
        for layer, numbers in health.items():
            found = symptoms(numbers)
            messages += [
                f"routing in {layer}: {text}" for name, text in found.items() if (layer, name) not in self._ill
            ]
            self._ill = {key for key in self._ill if key[0] != layer} | {(layer, name) for name in found}
        return messages


def symptoms(numbers: Mapping[str, float]) -> dict[str, str]:
    """Return the numbers of a layer that are too large, each with what to tell the user.

    A slot with a place may well take one token, which is no symptom; nor is a token with one slot, if places count in
    combine too.
    """
    scale = f" (scale {numbers['scale']:.3g})" if "scale" in numbers else ""
    cure = "lower the learning rate or decay the scale"
    limits = {
        "max_dispatch": (SATURATED, f"dispatch is saturated, each slot takes one token only{scale}; {cure}"),
        "max_combine": (SATURATED, f"combine is saturated, each token takes one slot only{scale}; {cure}"),
        "slot_similarity": (
            COLLAPSED,
            "the slots have collapsed, all ask for the same tokens; check normalize and the learning rate",
        ),
        "drop_rate": (DROPPED, "{:.0%} of the tokens reach no expert; raise capacity_factor or the balance losses"),
        "idle_experts": (IDLE, "{:.0%} of the experts get no token; raise importance_weight and load_weight"),
    }
    harmless = {"max_dispatch": "place_width" in numbers, "max_combine": numbers.get("combine_place", 0.0) > 0.0}
    return {
        name: message.format(numbers[name])
        for name, (limit, message) in limits.items()
        if numbers.get(name, 0.0) > limit and not harmless.get(name, False)
    }
