"""Real training steps, evaluations and inference on fake CUDA tensors: `python traces.py LIBRARY CASE...` prints, as
JSON, the waits of each case, or its error."""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fake import fake_cuda, load

SMALL = {
    "steps": 6, "device": "cuda", "precision": "float32", "data.train": "shapes?size=16", "data.batch_size": 4,
    "data.eval_batch_size": 8, "data.workers": 0, "data.transform.image_size": 16, "data.transform.crop": "resize",
    "data.transform.flip": False, "model.name": "soft_ti4_4e", "model.width": 16, "model.depth": 2, "model.heads": 2,
    "model.mlp_dim": 16, "schedule.kind": "constant", "schedule.warmup": 0, "evaluation.every": None,
    "evaluation.examples": 8, "log.quiet": True,
}  # fmt: skip
TEXT = {"text.size": "ti", "text.vocab_size": 300, "text.width": 16, "text.depth": 1, "text.heads": 2,
        "text.mlp_dim": 16, "text.length": 8}  # fmt: skip


def make_run(folder: str, changes: dict[str, Any]) -> Any:
    from softmoe.train.folder import RunFolder
    from softmoe.train.run import build

    config = settings(folder, changes)
    return build(config, RunFolder.of(config))


def settings(folder: str, changes: dict[str, Any]) -> Any:
    from softmoe.storage.files import flatten
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
        yield replace(batch, **{name: mode.from_tensor(value) for name, value in tensors_of(batch).items()})


def steps(changes: dict[str, Any], count: int = 3, compiled: bool = False) -> list[str]:
    """The waits of some training steps, the last of which keeps its routings for a line of metrics. Making the run is
    left out."""
    import torch

    with tempfile.TemporaryDirectory() as folder, fake_cuda() as waits:
        run = make_run(folder, changes)
        if compiled:
            torch.compiler.reset()
            whole = torch.compile(run.model, backend="aot_eager", fullgraph=True)
            run.forward = lambda images: unwatched(whole, images)
        feed = run.data.feed(run.data.loader.batches(0), run.device)
        feed.batches = from_host(feed.batches)
        waits.clear()
        for step in range(count):
            take_step(run, feed, keep_routing=step == count - 1)
        check_places(run)
        assert feed.starved == count  # here no device is ever busy
        return list(waits)


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


def evaluation(changes: dict[str, Any]) -> list[str]:
    """The waits of an evaluation in a run, which must be none: numbers come one batch behind."""
    from softmoe.data import feed
    from softmoe.models.classification import Totals
    from softmoe.train.reporting import evaluate

    fed = feed.fed
    with tempfile.TemporaryDirectory() as folder, fake_cuda() as waits:
        run = make_run(folder, changes)
        host = patch("softmoe.train.data.fed", lambda batches, *more: fed(from_host(batches), *more))
        known = patch("softmoe.models.classification.check_labels"), patch.object(Totals, "numbers", no_numbers)
        with host, known[0], known[1]:  # what labels and counts are is not known here
            waits.clear()
            evaluate(run)
        assert run.numbers
        return list(waits)


def no_numbers(totals: Any) -> dict[str, float]:
    return dict.fromkeys(("top1", "top5", "loss"), 0.0)


def saving(changes: dict[str, Any]) -> list[str]:
    """The waits of a step and a save after it: the copies go to pinned memory while the host goes on."""
    from softmoe.train.loop import save

    with tempfile.TemporaryDirectory() as folder, fake_cuda() as waits:
        run = make_run(folder, changes)
        snapshots = []
        run.store.save = lambda snapshot, best: snapshots.append(snapshot)
        feed = run.data.feed(run.data.loader.batches(0), run.device)
        feed.batches = from_host(feed.batches)
        take_step(run, feed)
        waits.clear()
        save(run)
        kept = {name: tensor for part in snapshots[0].tensors.values() for name, tensor in part.items()}
        assert {tensor.device.type for tensor in kept.values()} == {"cpu"}
        return list(waits)


def resuming(changes: dict[str, Any]) -> list[str]:
    """The waits of the steps after a resume from a checkpoint that was written on a CPU."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from softmoe.storage.weights import WeightFiles
    from softmoe.train import train
    from softmoe.train.loop import resume

    with tempfile.TemporaryDirectory() as folder:
        begun = settings(folder, changes | {"steps": 2, "device": "cpu"})
        train(begun)
        tensor = WeightFiles.tensor

        def read(files: WeightFiles, name: str) -> Any:
            with _disable_current_modes():
                found = tensor(files, name)
            return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE).from_tensor(found)

        with fake_cuda() as waits, patch.object(WeightFiles, "tensor", read):
            run = make_run(folder, changes | {"steps": 2})
            run.config = replace(
                run.config, device="cpu"
            )  # a run stays on its kind of device; what is read is the same
            resume(run)
            assert run.done.step == 2
            check_places(run)
            feed = run.data.feed(run.data.loader.batches(0), run.device)
            feed.batches = from_host(feed.batches)
            waits.clear()
            take_step(run, feed)
            return list(waits)


def take_step(run: Any, feed: Any, **options: Any) -> None:
    from softmoe.train.step import train_step

    failure = feed.fetch()
    if failure is not None:
        raise failure
    train_step(run, feed.take(), **options)


def waits_on_purpose() -> list[str]:
    import torch

    with fake_cuda() as waits:
        x = torch.ones(2, device="cuda")
        float(x.sum())
        x.cpu().to("cuda")
        torch.cuda.synchronize()
        return list(waits)


ROUTERS = ("tokens_choice", "experts_choice", "identity", "uniform", "soft_uniform", "uniform_soft", "placed")
IN_BACKWARD = {"optim.in_backward": True, "optim.clip_norm": None}
COMPACT = {"optim.states": "bfloat16"}
LOCKED = TEXT | {"model.locked": True}
CASES: dict[str, Callable[[], list[str]]] = {
    "softmax": partial(steps, {"objective.label_smoothing": 0.1}),
    "sigmoid": partial(steps, {"objective.loss": "sigmoid"}),
    "mixup, mirrored": partial(steps, {"data.transform.mixup": 0.8, "data.transform.flip": True}),
    **{name: partial(steps, {"model.router": name}) for name in ROUTERS},
    "bfloat16": partial(steps, {"precision": "auto", "model.dropout": 0.1}),
    "exact": partial(steps, {"precision": "exact", "model.router": "tokens_choice"}),
    "compiled": partial(steps, {"precision": "auto"}, compiled=True),
    "checkpointing": partial(steps, {"gradient_checkpointing": True, "precision": "auto"}),
    "accumulated": partial(steps, {"accumulate": 2, "model.router": "tokens_choice"}),
    "in the backward pass": partial(steps, IN_BACKWARD),
    "in the backward pass, compact": partial(steps, IN_BACKWARD | COMPACT),
    "compact moments": partial(steps, COMPACT | {"precision": "auto"}),
    "sgd": partial(steps, {"optim.name": "sgd"}),
    "sgd in the backward pass": partial(steps, IN_BACKWARD | {"optim.name": "sgd"}),
    "average": partial(steps, {"ema": 0.9, "optim.clip_norm": None}),
    "contrastive sigmoid": partial(steps, TEXT | {"objective.loss": "sigmoid"}),
    "contrastive softmax": partial(steps, TEXT | {"precision": "auto"}),
    "contrastive in parts": partial(steps, TEXT | {"accumulate": 2}),
    "locked tower": partial(steps, LOCKED),
    "evaluation": partial(evaluation, {}),
    "evaluation in bfloat16": partial(evaluation, {"precision": "auto", "ema": 0.9}),
    "evaluation of captions": partial(evaluation, TEXT),
    "saving": partial(saving, {"ema": 0.9}),
    "resuming": partial(resuming, {}),
    "resuming compact moments": partial(resuming, COMPACT | {"ema": 0.9}),
    "waits": waits_on_purpose,
    "names": lambda: list(CASES),
}


def try_kernels() -> None:
    """Let the compiled code of the CPU test itself now: among fake tensors it cannot."""
    from importlib import import_module

    from softmoe.accelerate.techniques import technique_names

    for name in technique_names():
        kernel = getattr(import_module(f"softmoe.accelerate.{name}"), "KERNEL", None)
        if kernel is not None:
            kernel.why_not()


def main(library: str, *names: str) -> None:
    load(library)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from softmoe.train import data

    try_kernels()
    data.LEARN_FROM = 100  # captions; a tokenizer of its own is not what is looked at
    found: dict[str, Any] = {}
    for name in names or CASES:
        try:
            found[name] = CASES[name]()
        except Exception as error:
            frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            ours = [frame for frame in frames if "site-packages" not in frame]
            found[name] = f"{type(error).__name__}: {str(error)[:300]}, at {', '.join(ours[-3:])}, {frames[-1]}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
