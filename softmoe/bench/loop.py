"""The suites of the training loop, with and without its data, and of drawing and reading images."""

import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from softmoe.bench.cases import Row
from softmoe.bench.timing import Probes, Timing, Work, interleave, summarize
from softmoe.budget import cost
from softmoe.budget.plan import DEVICES
from softmoe.data import Batch, Loader, Transform, TransformConfig, open_source
from softmoe.recipes import quickstart, quickstart_dense
from softmoe.train import TrainConfig
from softmoe.train.folder import RunFolder
from softmoe.train.run import build
from softmoe.train.step import train_step

RAW = "JPEG, decode, crop, to a raw batch"


def bench_loop(probes: Probes, *, seconds: float = 15.0, rounds: int = 41) -> Iterator[Row]:
    """Time a step of each quickstart model on ready batches, and with the data made beside it.

    The two take turns in one process, with the same model, batches and update.
    """
    roofline = probes.roofline(interleave(probes.functions(), rounds=7))
    for module in (quickstart, quickstart_dense):
        name = module.__name__.rsplit(".", 1)[1]
        with tempfile.TemporaryDirectory() as folder:
            config = module.recipe()
            config = replace(config, runs=folder, log=replace(config.log, quiet=True))
            ahead = config.data.prefetch  # a round is a multiple of it, since so many batches may be made at once
            timings = step_times(config, ahead * max(1, round(seconds / 2 / rounds / 0.1 / ahead)), rounds)
        classes = len(open_source(config.data.train, config.data.train_split).classes)
        shape = config.model.resolve(classes, config.data.transform.image_size)
        price, batch = cost(shape), config.data.batch_size
        height, width = shape.image_shape
        least = roofline.seconds(*Work(batch * price.macs, price.params, batch * 3 * height * width).train())
        for what, timing in zip(("bare step", "with data"), timings, strict=True):
            yield Row(f"{name}, batch {batch}", "train", what, timing, least / timing.median)


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
    bare, with_data = [], []
    for _ in range(rounds):
        bare.append(seconds(iter(ready)))
        ahead = run.data.loader.workers * run.data.loader.prefetch
        list(islice(batches, ahead))  # drop the batches that were prepared meanwhile
        with_data.append(seconds(islice(batches, steps)))
    run.close()
    return summarize(bare), summarize(with_data)


def bench_data(probes: Probes | None = None, *, seconds: float = 15.0) -> Iterator[Row]:
    """Time an image on one core, in processor time: generated scenes, and JPEG photos of 500 x 375 to 224 pixels.

    There is no roofline, since neither products nor memory bound a decoder.
    """

    def row(name: str, make: Callable[[], object], images: int) -> Row:
        return Row("one core", "image", name, per_image(make, images, seconds / 4), None)

    for size in (32, 64):
        source = open_source(f"shapes?size={size}", "train")
        transform = Transform(TransformConfig(image_size=size, crop="resize", flip=True), train=True)
        yield row(f"shapes, {size} px, to a batch", partial(next, Loader(source, transform, 128).batches(0)), 128)
    with tempfile.TemporaryDirectory() as folder:
        photos = make_photos(Path(folder), count=48)
        yield row("JPEG, plain decode by Pillow", lambda: [np.asarray(Image.open(io.BytesIO(p))) for p in photos], 48)
        source = open_source(f"folder:{folder}", "train")
        transform = Transform(TransformConfig(image_size=224, crop="inception", flip=True), train=True)
        for name, raw in (("JPEG, decode, crop, flip, to a batch", False), (RAW, True)):
            yield row(name, partial(next, Loader(source, transform, 48, raw=raw).batches(0)), 48)


def cores_needed(rows: list[Row]) -> Iterator[str]:
    """Yield a line for each GPU and model: how many images a second it would take, and how many such cores make them.

    Computed from the GPU's peak and the share of it that the planner expects, not measured.
    """
    image = next(row.timing.median for row in rows if row.name == RAW)
    for device in ("a100-40", "h100"):
        for model in ("soft_s16_128e", "soft_b16_128e", "soft_l16_128e"):
            rate = DEVICES[device].flops * DEVICES[device].share / cost(model).train_flops
            yield f"computed: {device} with {model} takes {rate:7,.0f} images/s, those of {rate * image:.1f} such cores"


def per_image(function: Callable[[], object], images: int, seconds: float) -> Timing:
    """Return the processor time of a function per image, called at least three times."""
    function()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) * images < seconds:
        begun = time.process_time()
        function()
        taken.append((time.process_time() - begun) / images)
    return summarize(taken)


def make_photos(folder: Path, count: int) -> list[bytes]:
    """Write JPEGs with the size and detail of photos: generated scenes, enlarged, with noise."""
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
