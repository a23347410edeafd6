"""Run a function on several ranks, each a real process, and get what they return."""

import io
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """[function(rank, *arguments) on each rank of a gloo group]. An error on any rank is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        results = start_ranks(world, in_group, str(Path(folder) / "store"), function, arguments)
    for rank, (_, error) in enumerate(results):
        if error:
            raise AssertionError(f"rank {rank} of {world}:\n{error}")
    return [value for value, _ in results]


def in_group(rank: int, world: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    patience = timedelta(seconds=200)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=patience)
    result = function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    return result


def start_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, seconds: float = 250.0, first: int | None = None
) -> list[tuple[Any, str | None]]:
    """[(function(rank, world, *arguments), or the traceback of its error)], in the environment of torchrun.

    Of the `first` ranks only, if that is given: the others are killed when these have answered.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parallel.preload"])  # import torch once for all
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world, port, theirs, function, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_receive(pipe, seconds) for pipe in pipes[:first]]
    finally:
        for process in processes[:first]:
            process.join(2.0)
        for process in processes:
            process.kill()


def _receive(pipe: Any, seconds: float) -> tuple[Any, str | None]:
    if not pipe.poll(seconds):
        return None, f"no answer after {seconds} seconds"
    try:
        result, error = pipe.recv()
    except EOFError:
        return None, "ended without an answer"
    return None if error else torch.load(io.BytesIO(result), weights_only=False), error


def _rank(rank: int, world: int, port: int, pipe: Any, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (rank, rank, world, port)), strict=True)) | {"MASTER_ADDR": "127.0.0.1"}
    try:
        result = io.BytesIO()  # as bytes: tensors in shared memory would end with this process
        torch.save(function(rank, world, *arguments), result)
        pipe.send((result.getvalue(), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
