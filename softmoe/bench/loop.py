"""The training loop against the bare train step, data included; and how fast images are made and read."""

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from softmoe.bench.timing import Timing, summarize
from softmoe.data import Batch, Loader, Transform, TransformConfig, open_source
from softmoe.recipes import quickstart, quickstart_dense
from softmoe.train import TrainConfig
from softmoe.train.folder import RunFolder
from softmoe.train.run import build
from softmoe.train.step import train_step


def bench_loop(steps: int = 40, rounds: int = 5) -> Iterator[tuple[str, Timing, Timing]]:
    """For each quickstart model: seconds a step of the bare step on ready batches, and with the data being made.

    The two take turns in one process, on the same model, the same batches and the same update.
    """
    for module in (quickstart, quickstart_dense):
        name = module.__name__.rsplit(".", 1)[1]
        with tempfile.TemporaryDirectory() as folder:
            config = module.recipe()
            config = replace(config, runs=folder, log=replace(config.log, quiet=True))
            bare, fed = step_times(config, steps, rounds)
        yield name, bare, fed


def step_times(config: TrainConfig, steps: int, rounds: int) -> tuple[Timing, Timing]:
    run = build(config, RunFolder.of(config))
    batches = run.data.loader.batches(0)
    ready = list(islice(batches, steps))

    def seconds(source: Iterator[Batch]) -> float:
        begun = time.perf_counter()
        for batch in source:
            train_step(run, batch)
        return (time.perf_counter() - begun) / steps

    seconds(iter(ready))  # warm-up
    bare, fed = [], []
    for _ in range(rounds):
        bare.append(seconds(iter(ready)))
        list(islice(batches, config.data.prefetch))  # what was prepared meanwhile must not count
        fed.append(seconds(islice(batches, steps)))
    run.close()
    return summarize(bare), summarize(fed)


def bench_data(rounds: int = 5) -> Iterator[tuple[str, float]]:
    """Images a second on one core (process time): generated scenes, and JPEG photos of 500 x 375 to 224 pixels."""
    for size in (32, 64):
        source = open_source(f"shapes?size={size}", "train")
        transform = Transform(TransformConfig(image_size=size, crop="resize", flip=True), train=True)
        stream = Loader(source, transform, 128).batches(0)
        yield (
            f"shapes, {size} px, to a batch",
            rate(lambda stream=stream: [next(stream) for _ in range(4)], 512, rounds),
        )
    with tempfile.TemporaryDirectory() as folder:
        photos = make_photos(Path(folder), count=48)
        yield (
            "JPEG, plain decode by Pillow",
            rate(lambda: [np.asarray(Image.open(io.BytesIO(p))) for p in photos], 48, rounds),
        )
        source = open_source(f"folder:{folder}", "train")
        transform = Transform(TransformConfig(image_size=224, crop="inception", flip=True), train=True)
        stream = Loader(source, transform, 16).batches(0)
        yield "JPEG, decode, crop, flip, to a batch", rate(lambda: [next(stream) for _ in range(3)], 48, rounds)


def rate(function: Callable[[], object], images: int, rounds: int) -> float:
    """Median over rounds, by the processor time of this process."""
    function()
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        function()
        taken.append(time.process_time() - begun)
    return images / statistics.median(taken)


def make_photos(folder: Path, count: int) -> list[bytes]:
    """JPEGs with the size and the detail of photos: generated scenes, enlarged, with grain."""
    rng = np.random.default_rng(0)
    scenes = open_source("shapes?size=128", "val")
    (folder / "train" / "class").mkdir(parents=True)
    photos = []
    for index in range(count):
        scene = Image.fromarray(scenes[index].image).resize((500, 375), Image.Resampling.BICUBIC)
        grain = np.asarray(scene) + rng.normal(0, 6, (375, 500, 3))
        path = folder / "train" / "class" / f"{index}.jpg"
        Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        photos.append(path.read_bytes())
    return photos
