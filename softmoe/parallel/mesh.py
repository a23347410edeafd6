"""Decide who does what: the ranks of a job arranged for experts and for shards.

The batch is split over all W ranks. Two numbers say where the weights are:

    expert   E consecutive ranks own the experts together, N/E each, and exchange slots
    shard    S consecutive ranks keep all other weights together, 1/S each (FSDP); 1 keeps a copy on every rank

Experts have W/E sets of owners. Where S is larger than E, each expert is also cut in S/E pieces among the ranks that
own the same experts; so there may be more ranks than experts, and memory still falls with every rank.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout


@dataclass(frozen=True)
class Sizes:
    """The plan of a mesh, before there is one. Numbers only."""

    world: int
    expert: int = 1
    shard: int = 1

    @property
    def pieces(self) -> int:
        """The number of pieces each expert is cut into."""
        return max(1, self.shard // self.expert)

    @property
    def copies(self) -> int:
        """The number of copies of each expert."""
        return self.world // (self.expert * self.pieces)

    def check(self) -> None:
        W, E, S = self.world, self.expert, self.shard
        for name, value in (("expert", E), ("shard", S)):
            if value < 1 or W % value:
                raise ValueError(
                    f"parallel.{name} must divide the number of processes: got {value} for {W}; "
                    f"possible are {', '.join(map(str, divisors(W)))}"
                )
        if E % S and S % E:
            raise ValueError(
                f"one of parallel.expert and parallel.shard must be a multiple of the other, got {E} and {S}"
            )


@dataclass(frozen=True)
class Mesh:
    sizes: Sizes
    experts: DeviceMesh
    """(copies, pieces, expert)"""
    rest: DeviceMesh
    """(replicate, shard)"""

    @property
    def owners(self) -> DeviceMesh:
        """The ranks that own the same experts: copies of pieces, or pieces only."""
        return self.experts["copies", "pieces"] if self.sizes.copies > 1 else self.experts["pieces"]

    @property
    def others(self) -> DeviceMesh:
        """The mesh that FSDP gets for the rest: copies of shards, or shards only."""
        return self.rest if self.sizes.world > self.sizes.shard else self.rest["shard"]


def make_mesh(expert: int = 1, shard: int = 1, device_type: str = "cpu", *, timeout: timedelta | None = None) -> Mesh:
    """Arrange all ranks of the process group, which must be there. Every rank calls this, with the same numbers.

    `timeout` is how long a rank waits for the others in any exchange on the mesh; None is torch's half an hour.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group: start with torchrun, or call torch.distributed.init_process_group")
    sizes = Sizes(dist.get_world_size(), expert, shard)
    sizes.check()
    experts = init_device_mesh(
        device_type, (sizes.copies, sizes.pieces, expert), mesh_dim_names=("copies", "pieces", "expert")
    )
    rest = init_device_mesh(device_type, (sizes.world // shard, shard), mesh_dim_names=("replicate", "shard"))
    if timeout is not None:
        for group in (*experts.get_all_groups(), *rest.get_all_groups()):
            _set_pg_timeout(timeout, group)
    return Mesh(sizes, experts, rest)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
