"""Draw docs/routing.png: the patches of one image on their way to the experts, sparse and soft.

    python tools/draw_routing.py

The lines are real routings: each router, fresh from its initialization (the Soft one with its scale at 12, so that
the weights can be told apart by eye), looks at the patches of one generated scene.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.offsetbox import AnnotationBbox, OffsetImage

from softmoe.data import open_source
from softmoe.moe import ExpertsChoiceRouter, SoftRouter, SparseRouting, TokensChoiceRouter

GRID, EXPERTS = 4, 4
COLORS = ("#4477aa", "#ee6677", "#228833", "#aa3377")


def main() -> None:
    image = open_source("shapes?size=64", "val")[7].image
    side = image.shape[0] // GRID
    patches = [image[y : y + side, x : x + side] for y in range(0, 64, side) for x in range(0, 64, side)]
    tokens = torch.tensor(np.stack(patches), dtype=torch.float32).flatten(1)
    tokens = (tokens - tokens.mean(0)) / 64
    dim = tokens.shape[1]
    torch.manual_seed(3)
    routers = {
        "Tokens Choice: each token picks an expert\n(a full expert drops tokens)": TokensChoiceRouter(dim, EXPERTS),
        "Experts Choice: each expert picks tokens\n(some get none, some several)": ExpertsChoiceRouter(dim, EXPERTS),
        "Soft MoE: each slot is a weighted average\nof all tokens, and nothing is dropped": SoftRouter(
            dim, EXPERTS, scale_init=12.0
        ),
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 5.4))
    for axis, (title, router) in zip(axes, routers.items(), strict=True):
        routing = router.eval()(tokens[None])
        draw(axis, title, patches, token_to_expert(routing, len(patches)))
    figure.tight_layout()
    figure.savefig(Path(__file__).parents[1] / "docs" / "routing.png", dpi=110)


def token_to_expert(routing: object, tokens: int) -> np.ndarray:
    """(tokens, experts): how much of each token lies in the slots of each expert, largest 1."""
    weights = np.zeros((tokens, EXPERTS))
    if isinstance(routing, SparseRouting):
        for expert, held in enumerate(routing.token_of_slot_NS.tolist()):
            for token in held:
                if token < tokens:
                    weights[token, expert] = 1.0
        return weights
    mixed = routing.dispatch_weights.detach()[0, :, :, 0].numpy()
    return mixed / mixed.max(axis=0)


def draw(axis: Axes, title: str, patches: list[np.ndarray], weights: np.ndarray) -> None:
    heights = np.linspace(1, 0, len(patches))
    experts = np.linspace(0.86, 0.14, EXPERTS)
    axis.set(xlim=(-0.12, 1.2), ylim=(-0.06, 1.06), title=title)
    axis.axis("off")
    for token, patch in enumerate(patches):
        if weights[token].max() == 0:
            axis.text(-0.1, heights[token], "x", color="crimson", fontsize=13, weight="bold", va="center", ha="center")
        axis.add_artist(AnnotationBbox(OffsetImage(patch, zoom=1.25), (0, heights[token]), pad=0.1))
        for expert in range(EXPERTS):
            weight = float(weights[token, expert])
            if weight > 0:
                ends = ([0.05, 0.92], [heights[token], experts[expert]])
                axis.plot(*ends, color=COLORS[expert], alpha=0.08 + 0.85 * weight, lw=0.6 + 2 * weight)
    for expert, height in enumerate(experts):
        box = {"boxstyle": "round,pad=0.45", "fc": COLORS[expert], "ec": "none"}
        axis.text(1.04, height, f"expert {expert + 1}", color="white", va="center", ha="center", bbox=box)


if __name__ == "__main__":
    main()
