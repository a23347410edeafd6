"""Kill a training run or fill its disk, again and again, and see that it ends with the same bits as one left alone.

    python tools/kill_test.py                              20 kills (SIGKILL) and 5 stops (SIGTERM) over one run
    python tools/kill_test.py --ranks 2 --kills 60         the same in a run of two processes
    python tools/kill_test.py --kills 0 --stops 0 --full 100 --steps 24

Half of the kills wait for a save to be under way. With --full, so many further runs have their disk filled at a random
moment, for a while or until they end: they must end with code 0 if and only if their last step is saved and the model
written, and finish once there is room (Linux, as root: the disk is a small file system in memory). Children are forked
from a server that has torch loaded, so a restart costs milliseconds. Exit code 0 if all is as it should be and model,
optimizer and metrics (without times) are equal.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from safetensors import safe_open

RECIPE = """
from dataclasses import replace
from softmoe import recipes
from softmoe.train import CheckpointSection, EvaluationSection

def recipe():
    config = recipes.load("quickstart", "tiny")
    return replace(
        config,
        steps={steps},
        ema=0.9,
        threads=1,
        model=config.model.change(dropout=0.1, noise_std=1.0),
        data=replace(config.data, workers={workers}),
        schedule=replace(config.schedule, warmup=5, cooldown={steps} // 4),
        evaluation=EvaluationSection(every=17, examples=8),
        checkpoint=CheckpointSection(every=3, keep_last=2, keep_every=25),
        log=replace(config.log, every=2, quiet=True),
    )
"""
PRELOAD = [
    "softmoe.recipes.quickstart",
    "softmoe.data.characters",
    "softmoe.train.loop",
    "softmoe.report",
    "matplotlib.pyplot",
    "torch._dynamo",
]
LOG = "kill_test.log"
DISK = 6 << 20  # bytes; a run has less than a third of that


def child(recipe: str, run: str, place: dict[str, str]) -> None:
    """One process of one start of the run, by the same command as a user's."""
    from softmoe.cli import main

    os.environ.update(place)
    runs, name = os.path.split(run)
    with Path(recipe).with_name(LOG).open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.exit(main(["train", recipe, "--runs", runs, "--run-name", name]))


@dataclass
class Command:
    """`softmoe train` in one process or several; each start goes on where the last one ended."""

    context: ForkServerContext
    recipe: Path
    ranks: int

    def start(self, run: Path) -> list[ForkServerProcess]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        places: list[dict[str, str]] = [{}]
        if self.ranks > 1:
            shared = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            places = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.ranks)]
        started = [self.context.Process(target=child, args=(str(self.recipe), str(run), place)) for place in places]
        for process in started:
            process.start()
        return started

    def finish(self, run: Path) -> bool:
        """Start it once more and leave it alone. Returns whether every process ended with code 0."""
        started = self.start(run)
        for process in started:
            process.join()
        return not any(process.exitcode for process in started)


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


def wait_for(processes: list[ForkServerProcess], run: Path, step: int, delay: float | None) -> None:
    """Until the run has passed `step`, and then `delay` seconds, or (None) until a save is under way."""
    while all(p.is_alive() for p in processes) and reached(run) < step:
        time.sleep(0.002)
    if delay is not None:
        time.sleep(delay)
    while delay is None and all(p.is_alive() for p in processes) and not saving(run):
        time.sleep(0.0005)


def hit(processes: list[ForkServerProcess], run: Path, number: signal.Signals, first: int) -> tuple[bool, bool]:
    """Send the signal to all processes, to number `first` before the others.

    Returns whether it arrived before the run ended by itself, and whether it left a half-written checkpoint. A SIGTERM
    before the first step ends the process as usual; after that the run saves and exits with 128 + the signal.
    """
    for process in [processes[first], *processes[:first], *processes[first + 1 :]]:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)
    for process in processes:
        process.join()
    return processes[first].exitcode in (-number, 128 + number), saving(run)


def outcome(run: Path) -> dict[str, object]:
    """What must be equal: checksums of the last checkpoint's weights and moments, and the metrics without times."""
    last = run / "checkpoints" / "last"
    manifest = json.loads((last / "manifest.json").read_text())
    values: dict[str, object] = {"step": manifest["step"]}
    for name in sorted(manifest["files"]):
        if name.endswith(".safetensors"):  # several processes write the same tensors in any order
            with safe_open(last / name, "np") as file:
                for key in sorted(file.keys()):
                    values[f"{name} {key}"] = hashlib.sha256(file.get_tensor(key).tobytes()).hexdigest()
    for i, line in enumerate((run / "metrics.jsonl").read_text().splitlines()):
        record = json.loads(line)
        record.pop("device_seconds")
        values[f"line {i} of the metrics"] = record
    return values


def differences(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """The first few values that are not equal, in the order of the run."""
    keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    return [f"  {key}: {ours.get(key)} and {theirs.get(key)}" for key in keys[:10]]


def verdict(command: Command, run: Path, whole: dict[str, object]) -> list[str]:
    """Finish the run and say in what it differs from the one left alone."""
    return differences(outcome(run), whole) if command.finish(run) else ["  the last start failed"]


def kill(command: Command, folder: Path, whole: dict[str, object], options: argparse.Namespace) -> bool:
    """One run that is killed and stopped at random moments. Prints and returns whether all was right."""
    chance, run = random.Random(options.seed), folder / "hit"
    signals = [signal.SIGKILL] * options.kills + [signal.SIGTERM] * options.stops
    chance.shuffle(signals)
    arrived = {signal.SIGKILL: 0, signal.SIGTERM: 0}
    in_save, kills = 0, 0
    for i, number in enumerate(signals):
        part = 0.8 * options.steps / len(signals)
        step = round(part * (i + chance.random()))
        kills += number == signal.SIGKILL
        delay = None if number == signal.SIGKILL and kills % 2 else chance.uniform(0.0, 0.02)
        processes = command.start(run)
        wait_for(processes, run, step, delay)
        hit_it, half = hit(processes, run, number, chance.randrange(options.ranks))
        arrived[number] += hit_it
        in_save += half
    different = verdict(command, run, whole)
    print(
        f"{options.steps} steps, {options.ranks} processes, {arrived[signal.SIGKILL]} kills ({in_save} of them during "
        f"a save), {arrived[signal.SIGTERM]} stops: "
        + ("\n".join(["DIFFERENT", *different]) if different else "identical bit for bit"),
        flush=True,
    )
    enough = arrived[signal.SIGKILL] == options.kills and arrived[signal.SIGTERM] == options.stops
    if not enough:
        print("the run ended before all signals were sent; use more --steps")
    return enough and not different


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path: Path) -> None:
    """Until nothing more goes in."""
    with path.open("wb", buffering=0) as file:
        for size in (65536, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def fill_disks(command: Command, folder: Path, whole: dict[str, object], options: argparse.Namespace) -> bool:
    """Many runs whose disk is full for a time or until they end. Prints and returns whether all was right."""
    chance, wrong, failed, recovered = random.Random(f"full {options.seed}"), [], 0, 0
    with small_disk(folder / "disk") as disk:
        for number in range(options.full):
            run, filler = disk / "run", disk / "filler"
            processes = command.start(run)
            wait_for(processes, run, chance.randrange(options.steps), chance.uniform(0.0, 0.05))
            fill(filler)
            if chance.random() < 0.5:  # there is room again before it ends, perhaps
                time.sleep(chance.uniform(0.0, 0.3))
                filler.unlink()
            for process in processes:
                process.join()
            code = max(process.exitcode or 0 for process in processes)
            filler.unlink(missing_ok=True)
            kept = (run / "model" / "model.safetensors").is_file() and (outcome(run)["step"] == options.steps)
            if (code == 0) != kept:
                wrong.append(f"  run {number}: exit code {code}, but the last step is {'' if kept else 'not '}kept")
            failed += code != 0
            recovered += code == 0
            wrong += [f"  run {number}: {line.strip()}" for line in verdict(command, run, whole)]
            shutil.rmtree(run)
    print(
        f"{options.full} runs of {options.steps} steps with a full disk, {failed} ended with a code other than 0 and "
        f"{recovered} had room again in time: "
        + ("\n".join(["WRONG", *wrong[:20]]) if wrong else "codes are true, and all finish identical bit for bit"),
        flush=True,
    )
    return not wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--full", type=int, default=0, help="runs whose disk is filled")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=1, help="processes of the run")
    parser.add_argument("--workers", type=int, default=0, help="data worker processes of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; the machine's own timing adds to them")
    options = parser.parse_args(argv)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = folder / "recipe.py"
        recipe.write_text(RECIPE.format(steps=options.steps, workers=options.workers))
        command = Command(context, recipe, options.ranks)
        if not command.finish(folder / "whole"):
            print((folder / LOG).read_text(), file=sys.stderr)
            return 1
        whole, right = outcome(folder / "whole"), True
        if options.kills + options.stops:
            right &= kill(command, folder, whole, options)
        if options.full:
            right &= fill_disks(command, folder, whole, options)
        if not right:
            shutil.copy(folder / LOG, LOG)
            print(f"what the runs said is in {LOG}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
