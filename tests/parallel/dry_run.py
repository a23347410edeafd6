"""Trace the real sharded training step of one rank of many, without the ranks and without the memory.

A process group that sends nothing and tensors that hold nothing: the code that runs is that of training.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from softmoe.models import VisionTransformer, ViTConfig
from softmoe.parallel import Layout
from softmoe.parallel.reduce import local
from softmoe.parallel.spread import apply, make_mesh


@dataclass(frozen=True)
class Trace:
    """Bytes kept and sent by one rank."""

    weights: int
    gradients: int
    optimizer: int
    peak: int
    """The most bytes that live at once in a step."""
    sent: dict[str, int]
    """all_to_all, gather, reduce: the larger side of each collective, summed over a step."""


def dry_run(config: ViTConfig, sizes: Layout, images: int, *, checkpointing: bool = False) -> Trace:
    """Trace one float32 AdamW step on `images` images per rank.

    Makes a process group of its own: call it in a process that has none, for example `python -c`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes.check()
    dist.init_process_group("fake", rank=0, world_size=sizes.world, store=FakeStore())
    try:
        mesh = make_mesh(sizes.expert, sizes.shard)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = empty_model(config)
            model.set_grad_checkpointing(checkpointing)
            with real_meshes():
                apply(model, mesh)
            return trace_steps(model, torch.empty(images, 3, *config.image_shape))
    finally:
        dist.destroy_process_group()


def trace_steps(model: VisionTransformer, images: torch.Tensor) -> Trace:
    """Run a step to see memory, one to see what is sent, then the optimizer.

    The tracker looks at forward and backward only, where the peak is: how DTensor prepares the optimizer's step, on
    shapes of all ranks together, is no memory of anybody.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    tracker, counter = FSDPMemTracker(model), Sent()
    tracker.track_inputs((images,))
    with tracker:
        step(model, images)
    optimizer.zero_grad()
    with counter:
        step(model, images)
    optimizer.step()
    parameters = list(model.parameters())
    unseen = sum(local(p).nbytes for p in parameters if not is_tracked(p))
    peaks = tracker.get_tracker_snapshot("peak")
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments = sum(local(value).nbytes for value in states)
    return Trace(
        weights=sum(local(p).nbytes for p in parameters),
        gradients=sum(local(p.grad).nbytes for p in parameters if p.grad is not None),
        optimizer=moments,
        peak=unseen + moments + sum(int(snapshot["Total"]) for snapshot in peaks.values()),
        sent=dict(counter.bytes),
    )


def step(model: nn.Module, images: torch.Tensor) -> None:
    model(images).float().square().mean().backward()


def is_tracked(parameter: nn.Parameter) -> bool:
    """Tell if the tracker sees a tensor. It sees what FSDP manages: not scalars, nor experts that have one owner."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.mesh_dim_names != ("expert",)


@contextmanager
def real_meshes() -> Iterator[None]:
    """Keep meshes real: FSDP puts them together and looks up its place in them, which has to be a real tensor."""
    join = DeviceMesh._concatenate

    def join_really(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return join(device_mesh_list)

    try:
        DeviceMesh._concatenate = staticmethod(join_really)
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(join)


def empty_model(config: ViTConfig) -> VisionTransformer:
    """Make parameters that have shapes but no values, on the CPU as far as anyone can tell."""
    with torch.device("meta"):
        model = VisionTransformer(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))
    return model


class Sent(TorchDispatchMode):
    """A mode that adds up what goes through collectives, by kind."""

    KINDS = (
        ("alltoall", "all_to_all"),
        ("allgather", "gather"),
        ("reduce_scatter", "reduce"),
        ("allreduce", "reduce"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            kind = next((kind for word, kind in self.KINDS if word in func.name()), None)
            if kind is not None:
                leaves = tree_leaves(args)
                self.bytes[kind] += max((leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)
        return func(*args, **(kwargs or {}))


def trace(rank: int, world: int, cases: list[tuple[ViTConfig, tuple[int, int, int], int, bool]]) -> list[Trace]:
    return [dry_run(config, Layout(*sizes), images, checkpointing=again) for config, sizes, images, again in cases]


def trace_all(cases: list[Any]) -> list[Trace]:
    """Trace all cases in a process that has no process group of its own."""
    from parallel.ranks import start_ranks

    [(traces, error)] = start_ranks(1, trace, cases)
    assert error is None, error
    return traces
