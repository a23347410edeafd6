"""Draw docs/concepts/frame.png: the frame of a trained router, and what its slots take, where a character moves.

    softmoe train quickstart --data "characters?size=48&classes=1000&scene=moving" --data.transform.image-size 48 \
        --model.num-experts 36 --model.combine-place True --steps 3000 --run-name moving
    python tools/draw_frame.py runs/moving
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from draw_concepts import save, shaded, show
from matplotlib.patches import Rectangle
from torch import Tensor, nn

import softmoe
from softmoe.data import open_source, to_tensor
from softmoe.inspection import record
from softmoe.moe import PlacedRouter
from softmoe.moe.placed import grid_places

DATA, CLASSES, CLASS = "characters?size=48&classes=1000&scene=moving", 1000, 3
PICTURES = 5
PARTS = {  # of the frame: row and column
    "upper left": (0.25, 0.25),
    "upper right": (0.25, 0.75),
    "middle": (0.5, 0.5),
    "lower left": (0.75, 0.25),
    "lower right": (0.75, 0.75),
}


def main(run: str) -> None:
    model = softmoe.from_pretrained(run).eval()
    source = open_source(DATA, "val")
    images = np.stack([source[CLASS + CLASSES * k].image for k in range(PICTURES)])
    router, seen = last_router(model), {}
    router.register_forward_pre_hook(lambda _, args: seen.update(x=args[0], grid=args[2]))
    with record(model) as recording, torch.inference_mode():
        model(to_tensor(images))
        boxes = frames(router, seen["x"], seen["grid"])
    dispatch = list(recording.routings.values())[-1].dispatch_weights.flatten(2)
    center_S2 = router.place.center.detach().flatten(0, 1)
    slots = [int((center_S2 - torch.tensor(part)).norm(dim=1).argmin()) for part in PARTS.values()]
    figure, axes = plt.subplots(1 + len(slots), PICTURES, figsize=(1.25 * PICTURES + 0.9, 1.25 * (1 + len(slots))))
    for k, (image, (top, left, size)) in enumerate(zip(images, boxes, strict=True)):
        show(axes[0, k], image, "")
        side = image.shape[0]
        box = Rectangle(
            (left * side - 0.5, top * side - 0.5), size * side, size * side, fill=False, color="#cc3311", lw=2
        )
        axes[0, k].add_patch(box)
        for row, slot in enumerate(slots):
            show(axes[1 + row, k], shaded(image, dispatch[k, :, slot].numpy()), "")
    names = ("the frame", *(f"slot {slot}\n{part}" for slot, part in zip(slots, PARTS, strict=True)))
    for axis, name in zip(axes[:, 0], names, strict=True):
        axis.set_ylabel(name, fontsize=9)
    figure.tight_layout(pad=0.4)
    save(figure, "frame.png")


def last_router(model: nn.Module) -> PlacedRouter:
    return [module for module in model.modules() if isinstance(module, PlacedRouter)][-1]


def frames(router: PlacedRouter, x_BMD: Tensor, grid: tuple[int, int]) -> list[tuple[float, float, float]]:
    """Return top, left and side of each image's frame, as shares of the image."""
    assert router.frame is not None
    place_M2, prefix = grid_places(grid, x_BMD)
    seen_BM2 = router.frame(place_M2, x_BMD[:, prefix:], None)
    found = []
    for seen_M2 in seen_BM2:  # places in the frame are places in the image, moved and scaled
        size = float((place_M2[-1] - place_M2[0]).norm() / (seen_M2[-1] - seen_M2[0]).norm())
        top, left = (place_M2[0] - seen_M2[0] * size).tolist()
        found.append((top, left, size))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
