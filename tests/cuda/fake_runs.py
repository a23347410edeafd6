"""Runs of fake CUDA tensors: settings of a small one, batches of real numbers that become fake, and their checks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from fake import pinned

SMALL = {
    "steps": 6, "device": "cuda", "precision": "float32", "data.train": "shapes?size=16", "data.batch_size": 4,
    "data.eval_batch_size": 8, "data.workers": 0, "data.transform.image_size": 16, "data.transform.crop": "resize",
    "data.transform.flip": False, "model.name": "soft_ti4_4e", "model.width": 16, "model.depth": 2, "model.heads": 2,
    "model.mlp_dim": 16, "schedule.kind": "constant", "schedule.warmup": 0, "evaluation.every": None,
    "evaluation.examples": 8, "log.quiet": True,
}  # fmt: skip


def make_run(folder: str, changes: dict[str, Any], **more: Any) -> Any:
    from softmoe.train.folder import RunFolder
    from softmoe.train.run import build

    config = settings(folder, changes)
    return build(config, RunFolder.of(config), **more)


def no_features(tower: Any, source: Any, transform: Any) -> Any:
    """Features of all images of a source, as a locked tower is replaced by."""
    return SimpleNamespace(
        vectors=np.zeros((len(source), tower.config.width), np.float32), indices=np.arange(len(source))
    )


@contextmanager
def real_files() -> Iterator[None]:
    """Weights are read from files as ever and become fake ones when they are read."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from softmoe.storage.weights import WeightFiles

    tensor = WeightFiles.tensor

    def read(files: WeightFiles, name: str) -> Any:
        with _disable_current_modes():
            found = tensor(files, name)
        return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE).from_tensor(found)

    with patch.object(WeightFiles, "tensor", read):
        yield


def settings(folder: str, changes: dict[str, Any]) -> Any:
    from softmoe.storage.settings import flatten
    from softmoe.train import TrainConfig

    values = TrainConfig().to_dict()
    for key, value in (SMALL | changes | {"runs": folder}).items():
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place[section]
        assert name in place or sections == ["model"], (key, sorted(flatten(values)))
        place[name] = value
    config = TrainConfig.from_dict(values)
    config.check()
    return config


def own_objective(model: Any, batch: Any) -> Any:
    """A user's objective: numbers beside the loss may be of the device, of the host, or Python's."""
    import torch

    found = model(batch.images)
    return found.square().mean(), {"there": found.mean(), "here": torch.full((), 2.0), "python": 1.0}


def from_host(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches made as ever, of real numbers, that become fake ones when they are done."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from softmoe.data.feed import tensors_of

    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    while True:
        with _disable_current_modes():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield replace(batch, **{name: pinned(mode.from_tensor(value)) for name, value in tensors_of(batch).items()})


def unwatched(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call without noting waits: the compiler takes none of the code that runs under a watch. A read inside would be a
    break of the graph, which is an error."""
    from torch.utils._python_dispatch import _pop_mode_temporarily

    with _pop_mode_temporarily():
        return function(*inputs)


def check_places(run: Any) -> None:
    """Everything that the next step uses is on the device, and of a type that other accelerators have too."""
    import torch

    kept = [*run.model.state_dict().values(), *(p.grad for p in run.model.parameters() if p.grad is not None)]
    kept += [value for state in run.optimizer.state.values() for value in state.values()]
    kept += [] if run.average is None else list(run.average.model.state_dict().values())
    assert {tensor.device.type for tensor in kept} == {"cuda"}
    assert torch.float64 not in {tensor.dtype for tensor in kept}


def check_save(run: Any, save: Callable[[Any], None]) -> None:
    """All that is saved was copied to the host."""
    from softmoe.parallel import local

    snapshots = []
    run.store.save = lambda snapshot, best: snapshots.append(snapshot)
    save(run)
    kept = [tensor for part in snapshots[0].tensors.values() for tensor in part.values()]
    assert {local(tensor).device.type for tensor in kept} == {"cpu"}
    assert snapshots[0].ready is not None  # whoever writes waits for the copies


@contextmanager
def real_meshes() -> Iterator[None]:
    """Let parts of meshes be cut and joined with real numbers: places in them are read."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._python_dispatch import _disable_current_modes

    def really(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with _disable_current_modes():
                return function(*arguments, **named)

        return call

    cut, join = DeviceMesh.__getitem__, DeviceMesh._concatenate
    with (
        patch.object(DeviceMesh, "__getitem__", really(cut)),
        patch.object(DeviceMesh, "_concatenate", staticmethod(really(join))),
    ):
        yield


def take_step(run: Any, feed: Any, **options: Any) -> None:
    from softmoe.train.step import train_step

    failure = feed.fetch()
    if failure is not None:
        raise failure
    train_step(run, feed.take(), **options)


def try_kernels() -> None:
    """Let the compiled code of the CPU test itself now: among fake tensors it cannot."""
    from importlib import import_module

    from softmoe.accelerate.techniques import technique_names

    for name in technique_names():
        kernel = getattr(import_module(f"softmoe.accelerate.{name}"), "KERNEL", None)
        if kernel is not None:
            kernel.why_not()
