"""Draw the paper's figures of a model's inside (sections I, J and the appendices), as PNG and SVG.

Needs matplotlib, the extra `plots`. Each function takes one Inspection and returns a figure, or None where the model
has nothing of that kind.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from softmoe.inspection.collect import Inspection, different_slots, layer_label
from softmoe.inspection.statistics import slot_correlation
from softmoe.inspection.streaming import BANDS
from softmoe.moe import SoftRouter

SLOTS_SHOWN = 1024  # of a correlation matrix
SLOT_IMAGES = 8


@dataclass(frozen=True)
class Drawn:
    caption: str
    paths: tuple[Path, ...]
    small_png: bytes
    """For the page: few pixels, few colors."""


def available() -> bool:
    return find_spec("matplotlib") is not None


def write_figures(model: Inspection, folder: Path) -> list[Drawn]:
    """Write every figure that fits the model, as NAME.png and NAME.svg."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, (draw, caption) in FIGURES.items():
        figure = draw(model)
        if figure is None:
            continue
        paths = folder / f"{name}.png", folder / f"{name}.svg"
        figure.savefig(paths[0], dpi=120)
        figure.savefig(paths[1], metadata={"Date": None})
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=75)
        plt.close(figure)
        drawn.append(Drawn(caption, paths, fewer_colors(buffer.getvalue())))
    return drawn


def token_and_expert_shares(model: Inspection) -> Any | None:
    """Draw the paper's three panels: what tokens give, what experts give, how many tokens a slot takes."""
    layers = of_kind(model, "dense")
    if not layers:
        return None
    figure, ((left, middle, right),) = panels(1, 3, 13 / 3, 3.9)
    colors = shades(len(layers))
    for color, (name, r) in zip(colors, layers.items(), strict=True):
        mass = r["token_mass"]
        counts = np.array(mass["counts"])
        upper = mass["bin_width"] * (np.arange(len(counts)) + 1)
        left.plot(upper, 100 * np.cumsum(counts) / counts.sum(), color=color, label=layer_label(name))
        experts = np.sort(r["importance"]["experts"])[::-1]
        middle.plot(np.arange(1, len(experts) + 1), experts / max(experts[-1], 1e-12), color=color)
    left.axvline(layers[next(iter(layers))]["token_mass"]["mean"], color="#888", ls=":", lw=1)
    widest = max(line.get_xdata()[-1] for line in left.lines[:-1])
    left.set(xlim=(0, min(4.0, widest)), xlabel="summed dispatch weight of a token", ylabel="tokens up to it (%)")
    legend(left)
    middle.set(xlabel="experts, most important first", ylabel="mean combine weight / smallest")
    middle.xaxis.get_major_locator().set_params(integer=True)
    name, r = next(iter(layers.items()))
    width = r["tokens_per_slot"]
    for slot_curve in width["curves"][:512]:
        right.plot(width["ranks"], slot_curve, color="#0b6e99", alpha=0.25, lw=0.8)
    right.set(
        xlabel=f"tokens, heaviest first ({layer_label(name)})", ylabel="share of the slot's weight", ylim=(0, 1.02)
    )
    for axis in (left, middle, right):
        plain(axis)
    return figure


def cumulative_dispatch(model: Inspection) -> Any | None:
    return curve_grid(model, "dispatch_curve", "tokens, heaviest first", "share of a slot's weight")


def cumulative_combine(model: Inspection) -> Any | None:
    if not any(r.get("combines", True) for r in of_kind(model, "dense").values()):
        return None  # in all layers slots go on alike
    return curve_grid(model, "combine_curve", "slots, heaviest first", "share of a token's weight")


def curve_grid(model: Inspection, key: str, x_label: str, y_label: str) -> Any | None:
    layers = of_kind(model, "dense")
    if not layers:
        return None
    figure, axes = grid(len(layers), 2.9, 2.6)
    for axis, (name, r) in zip(axes, layers.items(), strict=False):
        found = r[key]
        for share, alpha in zip(reversed(BANDS), (0.12, 0.16, 0.2, 0.26, 0.34), strict=True):
            axis.fill_between(found["ranks"], *found["bands"][str(share)], color="#0b6e99", alpha=alpha, lw=0)
        axis.plot(found["ranks"], found["mean"], color="#083d56")
        axis.plot([0, found["ranks"][-1]], [0, 1], color="#888", ls=":", lw=1)
        axis.set(title=layer_label(name), ylim=(0, 1.02), xlim=(0, found["ranks"][-1]))
        plain(axis)
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    return figure


def correlation(model: Inspection) -> Any | None:
    routers = {name: r for name, r in model.routers.items() if isinstance(r, SoftRouter)}
    if not routers:
        return None
    figure, axes = grid(len(routers), 3.0, 2.9)
    picture = None
    for axis, (name, router) in zip(axes, routers.items(), strict=False):
        slots = router.num_experts * router.slots_per_expert
        matrix = slot_correlation(router, SLOTS_SHOWN).float().cpu().numpy()
        picture = axis.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
        more = f", first {SLOTS_SHOWN} of {slots} slots" if slots > SLOTS_SHOWN else ""
        axis.set_title(f"{layer_label(name)}{more}", fontsize=9)
        axis.tick_params(labelsize=7)
    figure.colorbar(picture, ax=list(axes), shrink=0.6, label="inner product")
    return figure


def slot_images(model: Inspection) -> Any | None:
    """Draw the first sample, shaded by the most different slots of each layer."""
    if not model.samples:
        return None
    sample = model.samples[0]
    rows = len(sample.weights)
    columns = 1 + min(SLOT_IMAGES, *(w.dispatch.rest_MS.codes.shape[1] for w in sample.weights.values()))
    figure, axes = panels(rows, columns, 1.35, 1.5)
    for line, (name, weights) in zip(axes, sample.weights.items(), strict=True):
        dispatch_MS = weights.dispatch_MS()
        line[0].imshow(sample.pixels)
        line[0].set_ylabel(layer_label(name), fontsize=8)
        for axis, slot in zip(line[1:], different_slots(dispatch_MS, columns - 1), strict=False):
            axis.imshow(shaded(sample.pixels, dispatch_MS[:, slot], sample.grid))
            axis.set_title(f"slot {slot}", fontsize=7)
        for axis in line:
            axis.set(xticks=[], yticks=[])
    return figure


def shaded(pixels: np.ndarray, weights_M: np.ndarray, grid_shape: tuple[int, int]) -> np.ndarray:
    """Darken patches the more, the less they weigh; the heaviest keeps its brightness."""
    rows, columns = grid_shape
    patches = weights_M[len(weights_M) - rows * columns :].reshape(rows, columns)
    share = patches / max(patches.max(), 1e-300)
    height, width = pixels.shape[:2]
    by_pixel = share[np.arange(height) * rows // height][:, np.arange(width) * columns // width]
    return (pixels * (0.06 + 0.94 * by_pixel[..., None])).astype(np.uint8)


def collapse(model: Inspection) -> Any | None:
    layers = of_kind(model, "dense")
    if not layers:
        return None
    scales = [r["correlation"] and r["correlation"]["scale"] for r in layers.values()]
    panels = [
        ("largest weight, mean", [("dispatch", "mean_largest"), ("combine", "mean_largest")], (0, 1)),
        ("effective share", [("dispatch", "effective_share"), ("combine", "effective_share")], (0, 1.02)),
    ]
    known = [s for s in scales if s is not None]
    figure, axes = pyplot().subplots(1, 2 + bool(known), figsize=(11, 3.2), layout="constrained")
    names = [layer_label(name) for name in layers]
    for axis, (title, keys, limits) in zip(axes, panels, strict=False):
        for (kind, key), color in zip(keys, ("#0b6e99", "#d1495b"), strict=True):
            shown = [r[kind][key] if kind == "dispatch" or r.get("combines", True) else np.nan for r in layers.values()]
            axis.plot(names, shown, "o-", color=color, label=kind)
        axis.set(ylabel=title, ylim=limits)
        legend(axis)
    if known:
        axes[-1].plot(names, [np.nan if s is None else s for s in scales], "o-", color="#66a182")
        axes[-1].set(ylabel="scale of the logits", ylim=(1.1 * min(0.0, *known), 1.1 * max(1.0, *known)))
    for axis in axes:
        axis.tick_params(axis="x", rotation=60 if len(names) > 6 else 0, labelsize=8)
        plain(axis)
    return figure


def dropping(model: Inspection) -> Any | None:
    layers = of_kind(model, "sparse")
    if not layers:
        return None
    figure, ((left, right),) = panels(1, 2, 5.0, 3.4)
    left.bar([layer_label(name) for name in layers], [100 * r["dropped"] for r in layers.values()], color="#0b6e99")
    left.set(ylabel="tokens dropped (%)")
    left.tick_params(axis="x", rotation=60 if len(layers) > 6 else 0, labelsize=8)
    experts = 1
    for color, (name, r) in zip(shades(len(layers)), layers.items(), strict=True):
        experts = r["experts"]
        load = np.sort(r["load"])[::-1]
        right.plot(np.arange(1, len(load) + 1), 100 * load, "o-", ms=3, color=color, label=layer_label(name))
    right.axhline(100 / experts, color="#888", ls=":", lw=1)
    right.set(xlabel="experts, fullest first", ylabel="share of the tokens (%)", ylim=(0, None))
    legend(right)
    for axis in (left, right):
        plain(axis)
    return figure


FIGURES: dict[str, tuple[Callable[[Inspection], Any | None], str]] = {
    "contributions": (
        token_and_expert_shares,
        "Left: tokens by their summed dispatch weight (dotted: the mean). Middle: experts' mean combine weight, over "
        "the smallest. Right: each curve is a slot of the first MoE layer, and what its heaviest tokens make of it.",
    ),
    "slot_images": (
        slot_images,
        "One image, shaded by the dispatch weights of the most different slots of each layer.",
    ),
    "cumulative_dispatch": (
        cumulative_dispatch,
        "Cumulative dispatch weights: mean over slots and images, and the central 60, 80, 90, 95 and 99 %. "
        "Dotted: a plain average of all tokens.",
    ),
    "cumulative_combine": (
        cumulative_combine,
        "Cumulative combine weights: mean over tokens and images, and the central 60, 80, 90, 95 and 99 %. "
        "Dotted: a plain average of all slots.",
    ),
    "slot_correlation": (correlation, "Inner products of normalized slot parameters, slots in the order of experts."),
    "collapse": (
        collapse,
        "Largest weights (1 is a softmax that passes one entry only), effective number of tokens per slot and of slots "
        "per token as a share of all (1 is uniform), and the learned scale.",
    ),
    "dropping": (dropping, "Tokens that no expert takes, and how the taken ones are spread over the experts."),
}


def of_kind(model: Inspection, kind: str) -> dict[str, dict[str, Any]]:
    return {name: r for name, r in model.layers.items() if r["kind"] == kind}


def grid(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Make axes for `count` layers, up to six in a row; spare ones are hidden."""
    columns = min(count, 6)
    rows = -(-count // columns)
    figure, axes = panels(rows, columns, width, height)
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat[:count]


def shades(count: int) -> list[Any]:
    return list(pyplot().get_cmap("viridis")(np.linspace(0, 0.9, count)))


def panels(rows: int, columns: int, width: float = 4.4, height: float = 3.5) -> tuple[Any, Any]:
    """Make a figure and its (rows, columns) axes, each so many inches wide and high."""
    size = (width * columns, height * rows)
    return pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def plain(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def finish(axis: Any, x_label: str, y_label: str) -> None:
    """Name the two axes of a panel, and take the frame away. A share in percent has no ticks above 100."""
    axis.set(xlabel=x_label, ylabel=y_label)
    for side, text in ((axis.xaxis, x_label), (axis.yaxis, y_label)):
        if "(%)" in text and side.get_scale() == "linear":
            side.set_major_locator(ticks_up_to(100.0))
    plain(axis)


def ticks_up_to(most: float) -> Any:
    """Return matplotlib's usual choice of ticks without those above `most`: what is beyond it is room for words."""
    from matplotlib.ticker import AutoLocator

    class UpTo(AutoLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            return [tick for tick in super().tick_values(vmin, vmax) if tick <= most]

    return UpTo()


def fewer_colors(png: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(128).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def legend(axis: Any, title: str = "") -> None:
    """Name the curves above the axis, in as many columns as fit: never on what is drawn, however long the names."""
    names = axis.get_legend_handles_labels()[1]
    if not names:
        return
    inches = axis.get_window_extent().width / axis.figure.dpi
    columns = max(1, min(len(names), int(inches / (0.5 + 0.065 * max(map(len, names))))))
    axis.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, frameon=False, fontsize=8, title=title,
        title_fontsize=8, alignment="left", borderaxespad=0.2, columnspacing=1.2,
    )  # fmt: skip


def pyplot() -> Any:
    if not available():
        raise ValueError("figures need matplotlib: pip install 'softmoe-vit[plots]'")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
