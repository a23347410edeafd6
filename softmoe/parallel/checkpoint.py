"""Checkpoints that all ranks write together: whole or not there, and for any mesh.

    step_00001000/
      model/, optimizer/, ema/      one safetensors file per rank in each: its parts
      config.json, state.json, ...  texts, written by rank 0
      manifest.json                 size and SHA-256 of every file above

The ranks write into a hidden folder; when all of them are done, rank 0 writes the manifest and renames it. A rank that
dies before that leaves the last checkpoint as it was.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial as partial_of
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from softmoe.models.weights import sha256, write_text
from softmoe.parallel.state import write_parts


def write_sharded(
    target: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    texts: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the checkpoint `target`, called by all ranks of `group`. OSError on every rank if one of them fails.

    To write in the background, give tensors that training does not change, and a group of its own.
    """
    rank = dist.get_rank(group)
    partial = target.with_name(f".partial-{target.name}")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        for name, value in texts.items():
            write_text(partial / f"{name}.json", json.dumps(value, indent=2) + "\n")
            files[f"{name}.json"] = file_facts(partial / f"{name}.json")
        write_text(partial / "manifest.json", json.dumps({"step": step, "files": files}, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)  # one of the same step, if any
        os.rename(partial, target)
        sync_folder(target.parent)

    mine: dict[str, Any] = {}

    def write(name: str) -> None:
        write_parts(partial / name, tensors[name], group)
        for path in sorted((partial / name).glob(f"shard-{rank + 1:05d}-*.safetensors")):
            mine[f"{name}/{path.name}"] = file_facts(path)

    try:
        together(begin if rank == 0 else None, group)
        for name in tensors:
            together(partial_of(write, name), group)
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group=group)
        files = {name: facts for part in gathered for name, facts in sorted(part.items())}
        together(finish if rank == 0 else None, group)
    except OSError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def verify_sharded(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """The ranks share the files among them. ValueError on every rank if one is missing, cut or changed."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def check() -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, facts in sorted(manifest["files"].items())[rank::world]:
            if file_facts(folder / name) != facts:
                raise ValueError(f"{folder / name} does not match its manifest")

    together(check, group, ValueError)


def together(work: Callable[[], None] | None, group: dist.ProcessGroup | None, kind: type[Exception] = OSError) -> None:
    """Do the work (None: nothing) and wait for the others; if it failed on any rank, `kind` is raised on all."""
    error = None
    try:
        if work is not None:
            work()
    except (Exception, CheckpointException) as caught:  # the latter is no Exception
        error = describe(caught)
    errors: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    failed = {rank: text for rank, text in enumerate(errors) if text}
    if failed:
        rank, text = next(iter(failed.items()))
        raise kind(f"rank {rank}: {text}")


def describe(error: BaseException) -> str:
    """One line; of a failed distributed save, what failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def file_facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
