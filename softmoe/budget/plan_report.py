"""Show the planner's answer as plain text and as JSON-ready values."""

from dataclasses import asdict
from typing import Any

from softmoe.budget.plan import Hardware, Plan, best_plan
from softmoe.budget.report import aligned_columns, wrap

SHOWN = 8


def plan_report(name: str, candidates: list[Plan], hardware: Hardware, most: int | None) -> str:
    best = best_plan(candidates, hardware)
    fitting = [plan for plan in candidates if plan.memory().peak <= hardware.memory]
    first = candidates[0]
    lines = [
        f"{name}: {first.other_params + first.expert_params:,} parameters on {first.layout.devices} devices of "
        f"{hardware.memory / 1e9:g} GB, {first.settings.batch} images per step",
        "",
    ]
    if best is None:
        least = min(candidates, key=lambda plan: plan.memory().peak)
        lines += wrap(
            f"No layout fits. The smallest needs {gigabytes(least.memory().peak)} GB per device "
            f"({settings_text(least)}): use more devices, a smaller batch, or fewer experts."
        )
    else:
        lines += [*best_lines(best, hardware), "", f"Layouts that fit: {len(fitting)} of {len(candidates)}"]
        rows = sorted(fitting, key=lambda plan: plan.seconds(hardware))[:SHOWN]
        lines += aligned_columns(
            ["expert", "shard", "recompute", "GB", "ms", "images/s"],
            [
                [
                    str(plan.layout.expert),
                    str(plan.layout.shard),
                    "yes" if plan.settings.checkpointing else "no",
                    gigabytes(plan.memory().peak),
                    f"{plan.seconds(hardware) * 1e3:.1f}",
                    f"{plan.settings.batch / plan.seconds(hardware):,.0f}",
                ]
                for plan in rows
            ],
        )
    if most is not None:
        lines += ["", f"Most experts that fit, in powers of two, sharing the model's slots (one each at least): {most}"]
    return "\n".join([*lines, "", *wrap(assumptions(hardware))])


def best_lines(plan: Plan, hardware: Hardware) -> list[str]:
    need, traffic, times = plan.memory(), plan.traffic(), plan.step_seconds(hardware)
    speed = plan.settings.batch / plan.seconds(hardware)
    return [
        f"Best: {settings_text(plan)}",
        "",
        *aligned_columns(["per device", "GB"], [[kind, gigabytes(size)] for kind, size in asdict(need).items()]),
        "",
        *aligned_columns(
            ["sent per step and device", "MB"], [[k, f"{v / 1e6:,.1f}"] for k, v in asdict(traffic).items()]
        ),
        "",
        *aligned_columns(["step", "ms"], [[kind, f"{seconds * 1e3:.1f}"] for kind, seconds in times.items()]),
        f"together {plan.seconds(hardware) * 1e3:.1f} ms, of which products are {plan.efficiency(hardware):.0%}; "
        f"{speed:,.0f} images/s",
    ]


def settings_text(plan: Plan) -> str:
    text = f"--parallel.expert {plan.layout.expert} --parallel.shard {plan.layout.shard}"
    return text + (" --gradient-checkpointing True" if plan.settings.checkpointing else "")


def assumptions(h: Hardware) -> str:
    return (
        f"Assumed: {h.name}, {h.flops / 1e12:g} TFLOP/s of which steps reach {h.share:.0%}, "
        f"{h.memory_rate / 1e12:g} TB/s memory, nodes of {h.node} with {h.inside / 1e9:g} GB/s inside and "
        f"{h.between / 1e9:g} GB/s per device between them. Gradients come as activations go. All-to-alls are not "
        "hidden; gathers and reductions hide behind products. Not in it: data loading, the allocator's waste, anything "
        "measured."
    )


def plan_values(candidates: list[Plan], hardware: Hardware, most: int | None) -> dict[str, Any]:
    best = best_plan(candidates, hardware)
    return {
        "hardware": asdict(hardware),
        "best": None if best is None else values(best, hardware),
        "fitting": [values(p, hardware) for p in candidates if p.memory().peak <= hardware.memory],
        "most_experts": most,
    }


def values(plan: Plan, hardware: Hardware) -> dict[str, Any]:
    return {
        "layout": asdict(plan.layout),
        "settings": asdict(plan.settings),
        "memory": asdict(plan.memory()),
        "traffic": asdict(plan.traffic()),
        "seconds": plan.step_seconds(hardware) | {"step": plan.seconds(hardware)},
        "efficiency": plan.efficiency(hardware),
    }


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f}"
