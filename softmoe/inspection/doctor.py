"""Say in plain words what is wrong with a model or its training run: each check with its figure, its limit and advice.

The limits are rules of thumb. Where the paper reports figures of healthy models, they are well inside.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from torch import nn

from softmoe import accelerate
from softmoe.inspection.collect import layer_label
from softmoe.machine import bfloat16_works, safe_instruction_set

SATURATED = 0.95  # mean largest weight; 1 is a softmax that passes one entry only
# effective share of tokens in a slot; 1 is a plain average. From about three quarters on one expert with as many slots
# did as well as many in our runs (docs/experiments.md); the paper has layers of plain averages too, but not only those
UNIFORM = 0.75
DEAD = 0.01  # of the mean combine weight
DEAD_SLOTS = 0.10
COLLAPSED = 0.5  # effective share of experts
DUPLICATES = 0.05
LAZY = 0.9  # cosine of slots of one expert (the paper: extra slots align and add little)
SCALES = (0.05, 100.0)
DROPPED = 0.25  # the paper: 15 % is common at 16 to 32 experts, 25 % the most it saw for Tokens Choice
IDLE = 0.10
SKIPPED = 0.001
SPIKE = 5.0  # times the median of the lines before
SPIKES = 0.05
LOSS_RISE = 1.2
LOADER_BUSY = 0.8
SERIAL_SHARE = 0.3
SCALE_DRIFT = 30.0
LEARNED = 2.0  # times chance
OVERFIT = 1.15
_LINES = 8
_EARLY = 100  # steps


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check. `wrong` is None where the check could not be made; `figure` then says why."""

    check: str
    wrong: bool | None
    figure: str
    limit: str = ""
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Layers = Mapping[str, Mapping[str, Any]]
Rows = Sequence[Mapping[str, Any]]
_RATE = (
    "the learning rate is past what is stable: lower schedule.peak, lengthen schedule.warmup, set optim.clip_norm to 1"
)


def examine_layers(layers: Layers) -> list[Verdict]:
    """Judge what the routers did on images; `layers` are the results of inspection."""
    soft = {n: r for n, r in layers.items() if r["router"] in ("SoftRouter", "PlacedRouter")}
    dense = {n: r for n, r in layers.items() if r["kind"] == "dense"}
    # a slot with a place may well take one token; and a token one slot, if places count in combine too
    unplaced = {n: r for n, r in dense.items() if r["router"] != "PlacedRouter"}
    free_combine = {n: r for n, r in dense.items() if not r.get("combine_place", r["router"] == "PlacedRouter")}
    sparse = {n: r for n, r in layers.items() if r["kind"] == "sparse"}
    combining = {n: r for n, r in layers.items() if r.get("combines", True)}  # in others all slots go on alike
    one_hot = "lower the learning rate, decay the scale (optim.scale_decay), keep normalize on"
    return [
        *judge(
            "saturated dispatch",
            {n: r["dispatch"]["mean_largest"] for n, r in unplaced.items() if r["tokens"] > 1},
            "mean largest weight {}",
            f"each slot takes one token only: {one_hot}",
            above=SATURATED,
        ),
        *judge(
            "saturated combine",
            {
                n: r["combine"]["mean_largest"]
                for n, r in free_combine.items()
                if n in combining and r["experts"] * r["slots_per_expert"] > 1
            },
            "mean largest weight {}",
            f"each token takes one slot only: {one_hot}",
            above=SATURATED,
        ),
        *judge(
            "uniform dispatch",
            {n: r["dispatch"]["effective_share"] for n, r in soft.items() if r["tokens"] > 1},
            "slots average, effectively, {} of the tokens even",
            "the experts see nearly the same input and learn little of their own: compare with one expert of as many "
            "slots (model.num_experts 1), give slots a place (model.router placed), train longer, raise "
            "model.scale_init, have experts in the last blocks only (model.blocks), or give routers a higher rate "
            "(optim.lr_patterns)",
            above=UNIFORM,
            form=".1%",
            all_layers=True,
        ),
        *judge(
            "dead slots",
            {n: dead_slots(r) for n, r in soft.items() if n in combining},
            "{} of the slots give less than a hundredth of the mean",
            "these experts compute for nobody: use fewer experts, or lower the learning rate",
            above=DEAD_SLOTS,
            form=".1%",
        ),
        *judge(
            "expert collapse",
            {n: r["importance"]["effective_experts"] / r["experts"] for n, r in combining.items() if r["experts"] > 1},
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
    """Judge what the weights alone tell. `correlations` are those of the layers with slots."""
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
                f"{scales[layer]:.3g} in {layer_label(layer)}",
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
    """Judge if this CPU dies of bfloat16."""
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


def accelerate_and_tell(model: nn.Module) -> Verdict:
    """Accelerate a model, and say which accelerations this machine has for it and why not the others."""
    return Verdict("accelerations", False, str(accelerate.apply(model)).removeprefix("accelerate: "))


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
    """Judge a figure by its worst layer, which must not be above (or below) the limit; by the best with `all_layers`.

    There is no verdict if no layer is of the kind that `values` is about.
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
    return [Verdict(check, wrong, f"{words.format(format(value, form))} in {layer_label(layer)}", limit, advice)]


def examine_history(rows: Rows, warmup: int = 0) -> list[Verdict]:
    """Judge the course of a run by the lines of metrics.jsonl: failed steps, jumping gradients, a loss going up."""
    training = [row for row in rows if "grad_norm" in row]
    if not training:
        return [Verdict("course of training", None, "metrics.jsonl has no line of training yet")]
    return [_skipped(training), _spikes(training, warmup), _loss(training), *_drift(training)]


def examine_accuracy(rows: Rows, classes: int) -> list[Verdict]:
    """Judge what the run has learned: its accuracy against chance, and its validation loss against its best."""
    judged = [row for row in rows if row.get("val/top1") is not None and row.get("val/loss") is not None]
    if not judged or not classes:
        return [Verdict("accuracy", None, "metrics.jsonl has no evaluation yet")]
    last, best = judged[-1], min(judged, key=lambda row: row["val/loss"])
    found, chance = last["val/top1"], 1 / classes
    figure = f"top-1 {found:.1%} at step {last['step']}, chance is {chance:.1%}"
    advice = "the model has learned nothing yet: train longer, check the labels, or try another schedule.peak"
    early = last["step"] < _EARLY
    wait = f"; too early to judge before step {_EARLY}" if early else ""
    verdicts = [Verdict("accuracy", None if early else found < LEARNED * chance, figure + wait, "twice chance", advice)]
    train = next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), None)
    gap = f"validation loss {last['val/loss']:.3f}, lowest {best['val/loss']:.3f} at step {best['step']}"
    told = gap if train is None else f"{gap}, training loss {train:.3f}"
    advice = (
        "the model learns its training images by heart: more augmentation (data.transform), mixup, dropout or decay, "
        "fewer steps, or evaluation.patience to stop in time"
    )
    over = last["val/loss"] > OVERFIT * best["val/loss"] and train is not None and train < last["val/loss"]
    limit = f"at most {OVERFIT:g} times the lowest"
    return [*verdicts, Verdict("train and validation", None if early else over, told + wait, limit, advice)]


def _skipped(rows: Rows) -> Verdict:
    steps, skipped = rows[-1]["step"], rows[-1].get("skipped_steps", 0)
    figure = f"{skipped} of {steps} steps had no finite loss or gradient"
    return Verdict("skipped steps", skipped > SKIPPED * steps, figure, f"at most {SKIPPED:.1%}", _RATE)


def _spikes(rows: Rows, warmup: int) -> Verdict:
    norms = [row["grad_norm"] for row in rows if row["step"] > warmup and row["grad_norm"] is not None]
    if len(norms) < _LINES:
        return Verdict("gradient spikes", None, f"{len(norms)} lines of metrics after the warm-up are too few to tell")
    later = range(4, len(norms))
    spikes = sum(norms[i] > SPIKE * median(norms[max(0, i - 20) : i]) for i in later)
    share = spikes / len(later)
    figure = f"{spikes} of {len(later)} lines have a gradient norm over {SPIKE:g} times the usual"
    return Verdict("gradient spikes", share > SPIKES, figure, f"at most {SPIKES:.0%}", _RATE)


def _loss(rows: Rows) -> Verdict:
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    if len(losses) < _LINES:
        return Verdict("loss going up", None, f"{len(losses)} lines of metrics are too few to tell")
    smooth = [mean(losses[i : i + 3]) for i in range(len(losses) - 2)]
    rise = smooth[-1] / min(smooth) if min(smooth) > 0 else 1.0
    figure = f"the last loss is {rise:.2f} times the lowest"
    return Verdict("loss going up", rise > LOSS_RISE, figure, f"at most {LOSS_RISE:g} times", _RATE)


def _drift(rows: Rows) -> list[Verdict]:
    """Judge how far the routers' scales went since the first line."""
    moved = {}
    for layer, last in (rows[-1].get("routers") or {}).items():
        start = next((r["routers"][layer].get("scale") for r in rows if layer in (r.get("routers") or {})), None)
        if start and last.get("scale"):
            moved[layer] = (start, last["scale"])
    if not moved:
        return []
    layer = max(moved, key=lambda name: _factor(*moved[name]))
    start, end = moved[layer]
    return [
        Verdict(
            "scale drift",
            _factor(start, end) > SCALE_DRIFT,
            f"from {start:.3g} to {end:.3g} in {layer.removeprefix('encoder.')}",
            f"at most {SCALE_DRIFT:g} times, same sign",
            "the routers run away: lower the learning rate, set optim.scale_decay",
        )
    ]


def _factor(start: float, end: float) -> float:
    ratio = end / start
    return float("inf") if ratio <= 0 else max(ratio, 1 / ratio)


def examine_loading(rows: Rows, workers: int, batches: Any, batch_size: int) -> Verdict:
    """Judge if the loader could keep up. `batches[step]` makes one training batch as a worker does; it is timed."""
    last = next((row for row in reversed(rows) if row.get("device_seconds")), None)
    if last is None:
        return Verdict("data loading", None, "the run has noted no time yet")
    trained = last["images"] / last["device_seconds"]
    seconds = []
    for step in range(3):  # the best of three: other work on this machine only adds
        begun = time.perf_counter()
        batches[step]
        seconds.append(time.perf_counter() - begun)
    loaded = batch_size / min(seconds) * max(workers, 1)
    share, limit = trained / loaded, LOADER_BUSY if workers else SERIAL_SHARE
    how = (
        f"{workers} worker{'s' * (workers != 1)} could read" if workers else "reading inside the training process gives"
    )
    return Verdict(
        "data loading",
        share > limit,
        f"{how} {loaded:,.0f} images/s here, the run used {trained:,.0f} ({share:.0%})",
        f"at most {limit:.0%}",
        "training waits for images: raise data.workers, install 'softmoe-vit[fast]', or store images at a smaller size",
    )
