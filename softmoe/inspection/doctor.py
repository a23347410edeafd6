"""What is wrong with a model, in plain words: each check with its figure, its limit and what to do.

The limits are rules of thumb. Where the paper reports figures of healthy models, they are well inside.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from softmoe.inspection.page import short
from softmoe.machine import bfloat16_works, safe_instruction_set

SATURATED = 0.95  # mean largest weight; 1 is a softmax that passes one entry only
UNIFORM = (
    0.98  # effective share of tokens in a slot; 1 is a plain average (the paper: so in the last two layers at most)
)
DEAD = 0.01  # of the mean combine weight
DEAD_SLOTS = 0.10
COLLAPSED = 0.5  # effective share of experts
DUPLICATES = 0.05
LAZY = 0.9  # cosine of slots of one expert (the paper: extra slots align and add little)
SCALES = (0.05, 100.0)
DROPPED = 0.25  # the paper: 15 % is common at 16 to 32 experts, 25 % the most it saw for Tokens Choice
IDLE = 0.10


@dataclass(frozen=True)
class Verdict:
    """`wrong` is None where the check could not be made; `figure` then says why."""

    check: str
    wrong: bool | None
    figure: str
    limit: str = ""
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Layers = Mapping[str, Mapping[str, Any]]


def examine_layers(layers: Layers) -> list[Verdict]:
    """What the routers did on images; `layers` are the results of inspection."""
    soft = {n: r for n, r in layers.items() if r["router"] == "SoftRouter"}
    dense = {n: r for n, r in layers.items() if r["kind"] == "dense"}
    sparse = {n: r for n, r in layers.items() if r["kind"] == "sparse"}
    one_hot = "lower the learning rate, decay the scale (optim.scale_decay), keep normalize on"
    return [
        *judge(
            "saturated dispatch",
            {n: r["dispatch"]["mean_largest"] for n, r in dense.items() if r["tokens"] > 1},
            "mean largest weight {}",
            f"each slot takes one token only: {one_hot}",
            above=SATURATED,
        ),
        *judge(
            "saturated combine",
            {n: r["combine"]["mean_largest"] for n, r in dense.items() if r["experts"] * r["slots_per_expert"] > 1},
            "mean largest weight {}",
            f"each token takes one slot only: {one_hot}",
            above=SATURATED,
        ),
        *judge(
            "uniform dispatch",
            {n: r["dispatch"]["effective_share"] for n, r in soft.items() if r["tokens"] > 1},
            "slots average {} of the tokens even",
            "every expert sees the same mean token: train longer, raise model.scale_init, or give routers a higher "
            "rate (optim.lr_patterns)",
            above=UNIFORM,
            form=".1%",
            all_layers=True,
        ),
        *judge(
            "dead slots",
            {n: dead_slots(r) for n, r in soft.items()},
            "{} of the slots give less than a hundredth of the mean",
            "these experts compute for nobody: use fewer experts, or lower the learning rate",
            above=DEAD_SLOTS,
            form=".1%",
        ),
        *judge(
            "expert collapse",
            {n: r["importance"]["effective_experts"] / r["experts"] for n, r in layers.items() if r["experts"] > 1},
            "outputs come, effectively, from {} of the experts",
            "few experts do all the work: use fewer, or raise importance_weight and load_weight of sparse routers",
            below=COLLAPSED,
            form=".0%",
        ),
        *judge(
            "dropped tokens",
            {n: r["dropped"] for n, r in sparse.items()},
            "{} of the tokens reach no expert",
            "raise capacity_factor, use fewer experts, keep batch_priority on, or use the soft router: it drops none",
            above=DROPPED,
            form=".1%",
        ),
        *judge(
            "idle experts",
            {n: r["idle_experts"] for n, r in sparse.items()},
            "{} of the experts got no token",
            "raise importance_weight and load_weight, or use fewer experts",
            above=IDLE,
            form=".0%",
        ),
    ]


def examine_parameters(correlations: Layers, experts: int, tokens: int) -> list[Verdict]:
    """What the weights alone tell. `correlations` are those of the layers with slots."""
    found = judge(
        "duplicate slots",
        {n: c["duplicates"] for n, c in correlations.items()},
        "{} of the slots have a double in another expert",
        "slots that ask for the same tokens waste experts: use fewer experts, or start routers from other draws",
        above=DUPLICATES,
        form=".1%",
    )
    found += judge(
        "lazy second slots",
        {n: c["within_expert"] for n, c in correlations.items() if c["within_expert"] is not None},
        "slots of one expert have a mean cosine of {}",
        "extra slots repeat the first: give each expert one slot, and have more experts",
        above=LAZY,
        form=".2f",
    )
    scales = {n: c["scale"] for n, c in correlations.items() if c["scale"] is not None}
    if scales:
        low, high = SCALES
        layer = max(scales, key=lambda n: (not low <= scales[n] <= high, scales[n]))
        found.append(
            Verdict(
                "scale of the logits",
                not low <= scales[layer] <= high,
                f"{scales[layer]:.3g} in {short(layer)}",
                f"{low:g} to {high:g}",
                "a scale far out makes routing one-hot or flat: lower the learning rate, set optim.scale_decay",
            )
        )
    found.append(
        Verdict(
            "more experts than tokens",
            experts > tokens,
            f"{experts} experts, {tokens} tokens",
            f"at most {tokens} experts",
            "beyond one expert per token cost grows and little is gained: use fewer experts, or larger images",
        )
    )
    return found


def examine_machine(precision: str, device: str) -> Verdict:
    """Does this CPU die of bfloat16?"""
    works = bfloat16_works()
    cap = safe_instruction_set()
    figure = f"precision {precision}; bfloat16 products {'work' if works else 'crash'} on this CPU"
    if cap and works:
        figure += f", thanks to the cap ONEDNN_MAX_CPU_ISA={cap}"
    return Verdict(
        "bfloat16 on this CPU",
        precision == "bfloat16" and device == "cpu" and not works,
        figure,
        "bfloat16 only where it works",
        f"set precision to float32, or ONEDNN_MAX_CPU_ISA={cap or 'AVX512_CORE'} before python starts",
    )


def dead_slots(r: Mapping[str, Any]) -> float:
    slots = r["importance"]["slots"]
    mean = sum(slots) / len(slots)
    return sum(value < DEAD * mean for value in slots) / len(slots)


def judge(
    check: str,
    values: Mapping[str, float],
    words: str,
    advice: str,
    *,
    above: float | None = None,
    below: float | None = None,
    form: str = ".3f",
    all_layers: bool = False,
) -> list[Verdict]:
    """Wrong if the worst layer is above (or below) the limit; with `all_layers` only if the best one is, too.

    Empty where no layer is of the kind that `values` is about.
    """
    if not values:
        return []
    layer = (max if (above is not None) != all_layers else min)(values, key=lambda name: values[name])
    value = values[layer]
    if above is not None:
        wrong, limit = value > above, f"at most {format(above, form)}"
    else:
        assert below is not None
        wrong, limit = value < below, f"at least {format(below, form)}"
    return [Verdict(check, wrong, f"{words.format(format(value, form))} in {short(layer)}", limit, advice)]
