"""Compare the ways to start an upcycled model: distance from the dense one and accuracy, on images not fitted to.

    python tools/measure_upcycle.py MODEL DATA [--experts 64 16] [--images 256] [--test 1000]

MODEL is a dense model of ours with a head for the classes of DATA (a folder with train/ and val/, or a source as in
training). Routers are fitted to images of the training split and judged by images of the validation split.
"""

import argparse
import time
from typing import Any

import torch

from softmoe.data import Batch, Transform, evaluation_batches, open_source
from softmoe.evaluate.inputs import Loaded, load, match_classes, random_subset
from softmoe.transfer import upcycle
from softmoe.transfer.upcycling import INITS


def read(loaded: Loaded, data: str, split: str, count: int) -> Batch:
    source, _ = match_classes(open_source(data, split), loaded.saved.classes, loaded.model.config.num_classes or 0)
    some = random_subset(source, count, seed=1)
    transform: Transform = loaded.transform
    return next(iter(evaluation_batches(some, transform, len(some))))


@torch.no_grad()
def accuracy(model: Any, batch: Batch) -> float:
    pairs = zip(batch.images.split(64), batch.labels.split(64), strict=True)
    return sum(int((model(x).argmax(-1) == y).sum()) for x, y in pairs) / len(batch.labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument(
        "--experts", type=int, nargs="+", default=None, help="default: as many as tokens, and a quarter"
    )
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--test", type=int, default=1000)
    wanted = parser.parse_args()
    loaded = load(wanted.model, device="cpu")
    dense, tokens = loaded.model, loaded.model.config.tokens
    fit, test = read(loaded, wanted.data, "train", wanted.images), read(loaded, wanted.data, "val", wanted.test)
    print(f"dense: top-1 {accuracy(dense, test):.4f}, {tokens} tokens")
    print("experts init      features  logits  same class  top-1  seconds  layers")
    for experts in wanted.experts or (tokens, tokens // 4):
        for init in INITS:
            torch.manual_seed(0)
            begun = time.perf_counter()
            start = upcycle(dense, experts, init=init, images=fit.images, held_out=test.images)
            d, seconds = start.distance, time.perf_counter() - begun
            numbers = (
                f"{d.features:8.4f}{d.logits or 0:8.4f}{d.same_class or 0:12.3f}{accuracy(start.model, test):7.4f}"
            )
            layers = " ".join(f"{value:.3f}" for value in d.layers.values())
            print(f"{experts:7d} {init:10s}{numbers}{seconds:9.1f}  {layers}", flush=True)


if __name__ == "__main__":
    main()
