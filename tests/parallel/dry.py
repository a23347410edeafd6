"""Dry runs, in a process that has no process group of its own."""

from typing import Any

from softmoe.models import ViTConfig
from softmoe.parallel import Layout
from softmoe.parallel.dry_run import Trace, dry_run


def trace(rank: int, world: int, cases: list[tuple[ViTConfig, tuple[int, int, int], int, bool]]) -> list[Trace]:
    return [dry_run(config, Layout(*sizes), images, checkpointing=again) for config, sizes, images, again in cases]


def trace_all(cases: list[Any]) -> list[Trace]:
    from parallel.ranks import start_ranks

    [(traces, error)] = start_ranks(1, trace, cases)
    assert error is None, error
    return traces
