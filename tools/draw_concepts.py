"""Draw the pictures of docs/concepts: how soft routing works, slots, and cost.

    python tools/draw_concepts.py

Weights are those of the model that comes with the package on a picture of `shapes` it was not trained on; costs are by
formula.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

import softmoe
from softmoe.data import open_source, to_tensor
from softmoe.inspection import record
from softmoe.models import model_config

FOLDER = Path(__file__).parents[1] / "docs" / "concepts"
PICTURE, BLOCK = 5, "encoder.blocks.2.mlp"
COLORS = ("#4477aa", "#ee6677", "#228833", "#aa3377")


def main() -> None:
    model = softmoe.from_pretrained("demo").eval()
    image = open_source("shapes?size=48", "val")[PICTURE].image
    with record(model) as recording, torch.inference_mode():
        model(to_tensor(image[None]))
    routing = recording.routings[BLOCK]
    dispatch, combine = (w[0].flatten(1).numpy() for w in (routing.dispatch_weights, routing.combine_weights))
    save(draw_routing(image, dispatch, combine), "soft_routing.png")
    save(draw_slots(image, dispatch, routing.dispatch_weights.shape[-1]), "slots.png")
    save(draw_cost(), "cost.png")


def draw_routing(image: np.ndarray, dispatch: np.ndarray, combine: np.ndarray) -> Figure:
    figure, axes = plt.subplots(1, 5, figsize=(12, 4.2), width_ratios=(1.1, 0.8, 0.55, 0.5, 0.8))
    side = int(len(dispatch) ** 0.5)
    show(axes[0], image, f"{len(dispatch)} tokens:\nthe patches of an image")
    for place in np.arange(1, side) * image.shape[0] / side - 0.5:
        axes[0].axhline(place, color="white", lw=0.6)
        axes[0].axvline(place, color="white", lw=0.6)
    table(axes[1], dispatch, "dispatch: each column\nsums to 1")
    chosen = apart(dispatch, 4)
    axes[2].axis("off")
    axes[2].set_title("slots: averages\nof all tokens", fontsize=10)
    for row, slot in enumerate(chosen):
        inset = axes[2].inset_axes((0.0, 0.76 - 0.25 * row, 1.0, 0.23))
        inset.imshow(shaded(image, dispatch[:, slot]))
        inset.set(xticks=[], yticks=[])
        inset.set_ylabel(f"{slot}", rotation=0, labelpad=8, va="center", fontsize=9)
        for spine in inset.spines.values():
            spine.set(color=COLORS[row], linewidth=2)
    axes[3].axis("off")
    axes[3].set_title("experts:\nan MLP each", fontsize=10)
    for row, slot in enumerate(chosen):
        box = {"boxstyle": "round,pad=0.5", "fc": COLORS[row], "ec": "none"}
        axes[3].text(0.5, 0.875 - 0.25 * row, f"expert {slot // 2}", color="white", ha="center", va="center", bbox=box)
        axes[3].annotate("", (0.02, 0.875 - 0.25 * row), (-0.4, 0.875 - 0.25 * row), arrowprops={"arrowstyle": "->"})
    table(axes[4], combine, "combine: each row\nsums to 1")
    figure.tight_layout()
    return figure


def draw_slots(image: np.ndarray, dispatch: np.ndarray, slots_per_expert: int) -> Figure:
    figure, axes = plt.subplots(2, 9, figsize=(12, 2.8), width_ratios=(2.1, *[1] * 8))
    for axis in axes[:, 0]:
        axis.remove()
    show(figure.add_subplot(axes[0, 0].get_gridspec()[:, 0]), image, "the picture")
    for slot in range(dispatch.shape[1]):
        expert, which = divmod(slot, slots_per_expert)
        show(axes[which, 1 + expert], shaded(image, dispatch[:, slot]), f"expert {expert}" if which == 0 else "")
    figure.tight_layout()
    return figure


def draw_cost() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
    experts = [1, 2, 4, 8, 16, 32, 64, 128]
    costs = [softmoe.cost(model_config(f"soft_s16_{n}e", slots_per_expert=128 // n)) for n in experts]
    left.plot(experts, [c.forward_flops / 1e9 for c in costs], "o-", color=COLORS[0])
    left.set(xscale="log", xlabel="experts (128 slots in all)", ylabel="GFLOPs an image", ylim=(0, None))
    left.set_xticks(experts, map(str, experts))
    other = left.twinx()
    other.plot(experts, [c.params / 1e6 for c in costs], "s--", color=COLORS[1])
    other.set(ylabel="million parameters", ylim=(0, None))
    left.yaxis.label.set_color(COLORS[0])
    other.yaxis.label.set_color(COLORS[1])
    sizes = [224, 256, 320, 384, 448, 512]
    for name, color, label in (("vit_s16", "#666666", "dense"), ("soft_s16_128e", COLORS[0], "Soft MoE, 128 slots")):
        flops = [softmoe.cost(model_config(name, image_size=size)).forward_flops / 1e9 for size in sizes]
        right.plot(sizes, flops, "o-", color=color, label=label)
    right.legend(loc="upper left")
    right.set(xlabel="image size in pixels", ylabel="GFLOPs an image", ylim=(0, None))
    right.set_xticks(sizes, map(str, sizes))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def apart(dispatch: np.ndarray, count: int) -> list[int]:
    """Slots of different experts that differ most, the sharpest first."""
    left = list(range(dispatch.shape[1]))
    chosen = [int(np.argmax((dispatch**2).sum(0)))]
    while len(chosen) < count:
        left = [slot for slot in left if slot // 2 not in {c // 2 for c in chosen}]
        chosen.append(max(left, key=lambda s: min(np.abs(dispatch[:, s] - dispatch[:, c]).sum() for c in chosen)))
    return chosen


def shaded(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The image, dark where a slot takes little."""
    side = int(len(weights) ** 0.5)
    light = (weights / weights.max()).reshape(side, side).repeat(image.shape[0] // side, 0)
    light = light.repeat(image.shape[1] // side, 1)[..., None]
    return (image * (0.12 + 0.88 * light)).astype(np.uint8)


def show(axis: Axes, image: np.ndarray, title: str) -> None:
    axis.imshow(image)
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=10)


def table(axis: Axes, weights: np.ndarray, title: str) -> None:
    axis.imshow(weights, aspect="auto", cmap="Blues")
    axis.set(xticks=[], yticks=[], xlabel="slots", ylabel="tokens")
    axis.set_title(title, fontsize=10)


def save(figure: Figure, name: str) -> None:
    figure.savefig(FOLDER / name, dpi=100)
    plt.close(figure)
    Image.open(FOLDER / name).convert("RGB").quantize(128).save(FOLDER / name, optimize=True)


if __name__ == "__main__":
    main()
