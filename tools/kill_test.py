"""Kill a training run again and again, and see that it ends with the same bits as one that was left alone.

    python tools/kill_test.py                              20 kills (SIGKILL) and 5 stops (SIGTERM) over one run
    python tools/kill_test.py --kills 3 --stops 1 --steps 60

Half of the kills wait for a save to be under way. Children are forked from a server that has torch loaded, so a
restart costs milliseconds. Exit code 0 if model, optimizer and metrics (without times) are equal.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path


def child(folder: str, name: str, steps: int, workers: int) -> None:
    """One start of the run. Imports are here: the parent does not need torch."""
    from dataclasses import replace

    import torch

    from softmoe import recipes
    from softmoe.train import CheckpointSection, EvaluationSection, train

    torch.set_num_threads(1)
    config = recipes.load("quickstart", "tiny")
    config = replace(
        config,
        run_name=name,
        runs=folder,
        steps=steps,
        ema=0.9,
        model=config.model.change(dropout=0.1, noise_std=1.0),
        data=replace(config.data, workers=workers),
        schedule=replace(config.schedule, warmup=5, cooldown=steps // 4),
        evaluation=EvaluationSection(every=17, examples=8),
        checkpoint=CheckpointSection(every=3, keep_last=2, keep_every=25),
        log=replace(config.log, every=2, quiet=True),
    )
    result = train(config)
    sys.exit(0 if result.signal is None else 128 + result.signal)


def start(context: ForkServerContext, *arguments: object) -> ForkServerProcess:
    process = context.Process(target=child, args=arguments)
    process.start()
    return process


def reached(run: Path) -> int:
    """The last step in the run's metrics."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except (json.JSONDecodeError, KeyError):  # the line that is being written
            continue
    return 0


def saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".partial-step_*"))


def hit(
    process: ForkServerProcess, run: Path, step: int, number: signal.Signals, delay: float | None
) -> tuple[bool, bool]:
    """Send the signal once the run has passed `step`: after `delay` seconds, or (None) when a save is under way.

    Returns whether it arrived before the run ended by itself, and whether it left a half-written checkpoint. A SIGTERM
    before the first step ends the process as usual; after that the run saves and exits with 128 + the signal.
    """
    while process.is_alive() and reached(run) < step:
        time.sleep(0.002)
    if delay is not None:
        time.sleep(delay)
    while delay is None and process.is_alive() and not saving(run):
        time.sleep(0.0005)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, number)
    process.join()
    return process.exitcode in (-number, 128 + number), saving(run)


def outcome(run: Path) -> dict[str, object]:
    """What must be equal: checksums of the last checkpoint's weights and moments, and the metrics without times."""
    manifest = json.loads((run / "checkpoints" / "last" / "manifest.json").read_text())
    sums = {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".safetensors")}
    values: dict[str, object] = {"step": manifest["step"], **sums}
    for i, line in enumerate((run / "metrics.jsonl").read_text().splitlines()):
        record = json.loads(line)
        record.pop("device_seconds")
        values[f"line {i} of the metrics"] = record
    return values


def differences(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """The first few values that are not equal, in the order of the run."""
    keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    return [f"  {key}: {ours.get(key)} and {theirs.get(key)}" for key in keys[:10]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=0, help="data worker processes of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; the machine's own timing adds to them")
    options = parser.parse_args(argv)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["softmoe.recipes.quickstart", "softmoe.data.shapes", "softmoe.train.loop", "torch._dynamo"]
    )
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.steps, options.workers)
        whole = start(context, folder, "whole", *arguments)
        whole.join()
        if whole.exitcode:
            return 1
        run = Path(folder, "hit")
        signals = [signal.SIGKILL] * options.kills + [signal.SIGTERM] * options.stops
        chance.shuffle(signals)
        arrived = {signal.SIGKILL: 0, signal.SIGTERM: 0}
        in_save, kills = 0, 0
        for i, number in enumerate(signals):
            part = 0.8 * options.steps / len(signals)
            step = round(part * (i + chance.random()))
            kills += number == signal.SIGKILL
            delay = None if number == signal.SIGKILL and kills % 2 else chance.uniform(0.0, 0.02)
            hit_it, half = hit(start(context, folder, "hit", *arguments), run, step, number, delay)
            arrived[number] += hit_it
            in_save += half
        last = start(context, folder, "hit", *arguments)
        last.join()
        different = (
            ["the last start failed"] if last.exitcode else differences(outcome(run), outcome(Path(folder, "whole")))
        )
    print(
        f"{options.steps} steps, {arrived[signal.SIGKILL]} kills ({in_save} of them during a save), "
        f"{arrived[signal.SIGTERM]} stops: "
        + ("\n".join(["DIFFERENT", *different]) if different else "identical bit for bit")
    )
    enough = arrived[signal.SIGKILL] == options.kills and arrived[signal.SIGTERM] == options.stops
    if not enough:
        print("the run ended before all signals were sent; use more --steps")
    return 0 if enough and not different else 1


if __name__ == "__main__":
    sys.exit(main())
