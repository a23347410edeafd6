"""Checkpoints: atomic, checksummed, written in the background, nothing pickled.

    checkpoints/step_00001000/
      model.safetensors, config.json     the model, as any saved model
      ema.safetensors                    the averaged weights, if the run keeps them
      optimizer.safetensors              moments, by parameter name
      state.json                         step, counters, data position, seed, the run's settings
      manifest.json                      size and SHA-256 of the files above
    checkpoints/last, checkpoints/best   links to two of them

A checkpoint is written to a hidden folder, flushed to the disk and renamed: one that has its name is whole. Random
numbers and the order of the data are functions of (seed, step), so the step is all there is to keep of them.
"""

import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from softmoe.train.config import CheckpointSection
from softmoe.train.files import point_link, read_json, sha256, sync_file, sync_folder, write_json

_NAME = re.compile(r"step_(\d{8,})")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one step, in memory. `tensors` and `texts` map file names (without ending) to contents."""

    step: int
    tensors: dict[str, Tensors]
    texts: dict[str, dict[str, Any]]


class BrokenCheckpoint(ValueError):
    """A checkpoint whose files are missing, cut or changed."""


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def copy_tensors(tensors: Tensors) -> Tensors:
    """A copy in main memory that training will not change."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state by parameter name: `encoder.norm.weight/exp_avg`, ..."""
    tensors = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if value is not None:
                    tensors[f"{name}/{key}"] = value
    return tensors


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    parameters = {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }
    for key, value in tensors.items():
        name, _, part = key.rpartition("/")
        if name not in parameters:
            raise ValueError(f"the checkpoint has optimizer state of {name!r}, which this run does not train")
        optimizer.state[parameters[name]][part] = value.to(parameters[name].device, copy=True)  # not a map of the file


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write one checkpoint under `folder`; on failure nothing is left of it. OSError where the disk refuses."""
    target = folder / step_name(snapshot.step)
    partial = folder / f".partial-{target.name}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, tensors in snapshot.tensors.items():
            save_file(tensors, partial / f"{name}.safetensors")
            sync_file(partial / f"{name}.safetensors")
        for name, value in snapshot.texts.items():
            write_json(partial / f"{name}.json", value)
        files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(partial.iterdir())}
        write_json(partial / "manifest.json", {"step": snapshot.step, "files": files})
        shutil.rmtree(target, ignore_errors=True)  # one of the same step, if any: the new one takes its place
        os.rename(partial, target)
        sync_folder(folder)
    except SafetensorError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(str(error)) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def read_checkpoint(folder: Path) -> Snapshot:
    """Load and verify. BrokenCheckpoint, saying which file, if anything is not as it was written."""
    try:
        manifest = read_json(folder / "manifest.json")
        for name, expected in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != expected["bytes"]:
                raise BrokenCheckpoint(f"{path} has {path.stat().st_size} bytes instead of {expected['bytes']}")
            if sha256(path) != expected["sha256"]:
                raise BrokenCheckpoint(f"{path} does not match its checksum")
        names = [Path(name) for name in manifest["files"]]
        return Snapshot(
            manifest["step"],
            load_tensors(folder, [n for n in names if n.suffix == ".safetensors"]),
            {n.stem: read_json(folder / n) for n in names if n.suffix == ".json"},
        )
    except BrokenCheckpoint:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise BrokenCheckpoint(f"{folder} cannot be read: {error}") from error


def load_tensors(folder: Path, names: list[Path]) -> dict[str, Tensors]:
    """From files, or from folders with the parts that many processes wrote."""
    parts = {name.parts[0] for name in names if len(name.parts) > 1}
    whole = {name.stem: load_file(folder / name) for name in names if len(name.parts) == 1}
    if not parts:
        return whole
    from softmoe.parallel.state import read_all  # slow to import

    return whole | {name: read_all(folder / name) for name in sorted(parts)}


class CheckpointStore:
    """The checkpoints of one run. One write at a time; `report` gets a line for everything that went wrong."""

    def __init__(self, folder: Path, config: CheckpointSection, report: Callable[[str], None]):
        self.folder, self.config, self.report = folder, config, report
        self.failed_saves = 0
        self._writer: threading.Thread | None = None
        self.last_good: int | None = None

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def save(self, snapshot: Snapshot, best: int | None = None) -> None:
        """Write in the background (after the write before it, if that still runs), or at once if not asynchronous.

        `best` is the step of the best checkpoint so far, which is kept and gets the link `best`.
        """
        self.wait()
        if not self.config.asynchronous:
            self._write(snapshot, best)
            return
        self._writer = threading.Thread(target=self._write, args=(snapshot, best), name="checkpoint-writer")
        self._writer.start()

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def latest(self) -> Snapshot | None:
        """The newest checkpoint that is whole. Broken ones are reported and put aside; None for a new run."""
        self.sweep()
        steps = self.steps()
        for step in reversed(steps):
            try:
                snapshot = read_checkpoint(self.path(step))
            except BrokenCheckpoint as error:
                aside = self._put_aside(step)
                self.report(f"broken checkpoint: {error}; put aside as {aside}, trying the one before")
                continue
            self.last_good = step
            return snapshot
        if steps:
            raise ValueError(
                f"none of the {len(steps)} checkpoints in {self.folder} can be read (see the lines above): "
                "restore one, or remove the run's folder to start again"
            )
        return None

    def sweep(self) -> None:
        """Remove what a killed process left half written."""
        for partial in self.folder.glob(".partial-*"):
            shutil.rmtree(partial, ignore_errors=True)

    def _put_aside(self, step: int) -> Path:
        aside = self.folder / f"broken-{step_name(step)}"
        shutil.rmtree(aside, ignore_errors=True)
        return self.path(step).rename(aside)

    def _write(self, snapshot: Snapshot, best: int | None) -> None:
        try:
            self._put(snapshot)
        except OSError as error:
            self.failed_saves += 1
            kept = "no checkpoint yet" if self.last_good is None else f"the last good one is of step {self.last_good}"
            self.report(f"could not save step {snapshot.step}: {error}; training goes on, {kept}")
            return
        self.last_good = snapshot.step
        self._put_in_order(snapshot.step, best)

    def _put(self, snapshot: Snapshot) -> None:
        write_checkpoint(self.folder, snapshot)

    def _put_in_order(self, step: int, best: int | None) -> None:
        try:
            point_link(self.folder / "last", step_name(step))
            if best is not None and best in self.steps():
                point_link(self.folder / "best", step_name(best))
            self._prune(best)
        except OSError as error:
            self.report(f"saved step {step}, but could not put the folder in order: {error}")

    def _prune(self, best: int | None) -> None:
        steps = self.steps()
        keep = set(steps[-self.config.keep_last :])
        if self.config.keep_every:
            keep |= {step for step in steps if step % self.config.keep_every == 0}
        if self.config.keep_best and best is not None:
            keep.add(best)
        for step in set(steps) - keep:
            trash = self.folder / f".partial-{step_name(step)}-old"
            shutil.rmtree(trash, ignore_errors=True)
            os.rename(self.path(step), trash)  # so that a kill in the middle leaves no half checkpoint
            shutil.rmtree(trash, ignore_errors=True)
