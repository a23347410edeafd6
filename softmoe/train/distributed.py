"""The processes of a run: one, or those that torchrun started. Rank 0 leads: it alone writes and speaks."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from signal import Signals
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from softmoe.accelerate.buffers import total_norm
from softmoe.machine import choose_device
from softmoe.models import TwoTower, VisionTransformer, ViTConfig
from softmoe.parallel import clip_by_global_norm, global_norm
from softmoe.storage.files import first_line
from softmoe.train.config import ParallelSection, TrainConfig

Answer = Callable[[], tuple[Signals | None, Exception | None]]
"""Waits for the other processes and says whether to stop: the signal, or why there is no batch."""
LOST = ("gloo", "timed out", "timeout", "connection closed", "connection reset", "nccl")


class PeerLost(OSError):
    """Raised if another process ended, or did not take part in an exchange in time."""


@dataclass
class Team:
    """This process among the others. The default is one process alone."""

    rank: int = 0
    world: int = 1
    mesh: Any = None
    group: Any = None
    """A group for small messages on the CPU; gradients have another."""
    saving: Any = None
    """A group for saves in the background."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def local_rank(self) -> int | None:
        """The number of this process on its machine; None for one process alone."""
        return int(os.environ.get("LOCAL_RANK", self.rank)) if self.world > 1 else None

    @property
    def stream(self) -> TextIO | None:
        """The stream for progress lines; None is the usual one."""
        return None if self.leads else open(os.devnull, "w", encoding="utf-8")  # as long as the process

    @property
    def seed(self) -> tuple[int, ...]:
        """The numbers that a process adds to the seed of a step, so that no two draw the same noise."""
        return (self.rank,) if self.world > 1 else ()

    def check(self, config: TrainConfig, shape: ViTConfig) -> None:
        """Raise ValueError, before anything is built, for settings that these processes cannot share."""
        if self.world == 1:
            return
        from softmoe import parallel

        images = config.data.batch_size // self.world
        if images % config.accumulate:
            raise ValueError(f"accumulate must divide the {images} images of a process, got {config.accumulate}")
        if config.optim.in_backward:
            raise ValueError(
                "optim.in_backward is for one process: whether a step is skipped is decided by the gradients of all, "
                "which are there only after the pass. Set it to False; parallel.shard saves memory there"
            )
        parallel.check_groups(shape, images // config.accumulate)
        if shape.moe and shape.moe_blocks and self.mesh.sizes.expert > 1:
            hidden_dim = shape.moe.hidden_dim(shape.mlp_dim)
            self.mesh.sizes.check_experts(shape.moe.num_experts, shape.width, hidden_dim)

    def spread(
        self, make: Callable[[], VisionTransformer | TwoTower], dtype: torch.dtype | None = None, compile: bool = False
    ) -> VisionTransformer | TwoTower:
        """Spread the model that `make` builds over all processes; none of them ever holds it whole.

        Weights are sent in `dtype`.
        """
        if self.world == 1:
            return make()
        from softmoe import parallel

        options: dict[str, Any] = {"dtype": dtype, "compile": compile}
        with parallel.building(self.mesh, **options):
            model = make()
        return parallel.apply(model, self.mesh, **options)

    def reduce(self, model: nn.Module, *, now: bool) -> None:
        """Set whether the next backward pass adds up the gradients of all processes; of several parts the last does."""
        if self.world > 1:
            from softmoe import parallel

            parallel.reduce_gradients(model, self.mesh, now)

    def clip(self, gradients: list[Tensor], max_norm: float | None) -> Tensor:
        """Clip the gradients by their joint norm over all processes, and return the norm before."""
        return clip_by_global_norm(gradients, max_norm, total_norm if self.world == 1 else global_norm)

    def mean(self, values: Tensor) -> Tensor:
        if self.world == 1:
            return values
        dist.all_reduce(values)
        return values / self.world

    def ask(self, signal: Callable[[], Signals | None], failure: Exception | None = None) -> Answer:
        """Ask all processes, while the step is computed, whether to stop after it; all get the same answer.

        They stop for a signal, or because a process has no batch for the next step.
        """
        if self.world == 1:
            return lambda: (signal(), failure)
        flags = torch.tensor([int(signal() or 0), int(failure is not None)])
        exchange: Any = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group, async_op=True)

        def answer() -> tuple[Signals | None, Exception | None]:
            exchange.wait()
            number, failed = flags.tolist()
            why = PeerLost("another process has no data to go on with; its own message says why") if failed else None
            return Signals(number) if number else None, failure or why

        return answer

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier(self.group)

    def gather(self, value: Any, group: Any = None) -> list[Any]:
        """Return the values of all processes, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=group or self.group)
        return values


def fresh_store(patience: timedelta) -> Store:
    """Return a part of torchrun's store that belongs to this start alone.

    After a restart the addresses of killed processes are still in the store, and a quick process would call those.
    """
    store, _, _ = next(iter(rendezvous("env://", timeout=patience)))
    return PrefixStore(f"softmoe/start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def missing_ranks(rank: int, world: int, seconds: float) -> list[int]:
    """List the ranks that do not answer through the store, which works when other connections are broken.

    The list is empty if the store does not work either.
    """
    names = [f"lost/{other}" for other in range(world)]
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(names[rank], "here")
        end = time.monotonic() + seconds
        while time.monotonic() < end and not store.check(names):
            time.sleep(0.1)
        return [other for other, name in enumerate(names) if not store.check([name])]
    except (RuntimeError, ValueError):
        return []


@contextmanager
def process_team(config: ParallelSection, device: str = "auto") -> Iterator[Team]:
    """Meet the other processes, if torchrun started any; leave them at the end."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        if config.expert * config.shard > 1:
            processes = max(config.expert, config.shard)
            raise ValueError(
                f"parallel.expert {config.expert} and parallel.shard {config.shard} need at least {processes} "
                f"processes, and there is one: torchrun --nproc-per-node {processes} -m softmoe train ..."
            )
        yield Team()
        return
    from softmoe import parallel

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"of several processes each takes a GPU of its own: --device cuda (or cpu), not {device}")
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    parallel.Layout(world, config.expert, config.shard).check()
    patience = timedelta(seconds=config.timeout)
    rank, host = int(os.environ["RANK"]), socket.gethostname()
    if cuda:  # NCCL takes the current device, so it must be this process's own before the first exchange
        choose_device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    try:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=fresh_store(patience), rank=rank, world_size=world, timeout=patience)
        mesh = parallel.make_mesh(config.expert, config.shard, "cuda" if cuda else "cpu", timeout=patience)
        groups: list[Any] = [dist.new_group(backend="gloo", timeout=patience) for _ in range(2)]
        yield Team(rank, world, mesh, *groups)
        dist.barrier(groups[0])
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error).lower() for word in LOST):
            raise
        missing = missing_ranks(rank, world, min(5.0, config.timeout))
        lost = f"rank {', '.join(map(str, missing))}, which" if missing else "another, which"
        raise PeerLost(
            f"rank {rank} of {world} on {host} lost {lost} ended or did not come within {config.timeout:g} s "
            f"(parallel.timeout): {first_line(error)}. The same command continues from the last "
            "checkpoint"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
