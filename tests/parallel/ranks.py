"""Run a function on several ranks of a gloo group, each a real process, and get what they return."""

import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, seconds: float = 240.0) -> list[Any]:
    """[function(rank, *arguments) on each rank]. An error on any rank is raised here, with its traceback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parallel.preload"])  # import torch once for all
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            arguments_of_rank = (rank, world, str(Path(folder) / "store"), theirs, function, arguments)
            process = context.Process(target=_rank, args=arguments_of_rank, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            results = [_receive(pipe, rank, seconds) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(2.0)
                process.kill()
    for rank, (_, error) in enumerate(results):
        if error:
            raise AssertionError(f"rank {rank} of {world}:\n{error}")
    return [torch.load(io.BytesIO(value), weights_only=False) for value, _ in results]


def _receive(pipe: Any, rank: int, seconds: float) -> tuple[Any, str | None]:
    if not pipe.poll(seconds):
        return None, f"no answer after {seconds} seconds"
    try:
        return pipe.recv()
    except EOFError:
        return None, "ended without an answer"


def _rank(
    rank: int, world: int, store: str, pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        result = io.BytesIO()
        torch.save(function(rank, *arguments), result)  # as bytes: tensors in shared memory would end with this process
        pipe.send((result.getvalue(), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((None, traceback.format_exc()))
