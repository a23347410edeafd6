"""`python traces.py LIBRARY CASE...` runs real code on fake CUDA tensors and prints waits, or the error, as JSON."""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fake import fake_cuda, load, moved
from fake_runs import (
    check_places,
    check_save,
    from_host,
    make_run,
    no_features,
    own_objective,
    real_files,
    real_meshes,
    settings,
    take_step,
    try_kernels,
    unwatched,
)

TEXT = {"text.size": "ti", "text.vocab_size": 300, "text.width": 16, "text.depth": 1, "text.heads": 2,
        "text.mlp_dim": 16, "text.length": 8}  # fmt: skip


def steps(changes: dict[str, Any], count: int = 3, compiled: bool = False, **more: Any) -> list[str]:
    """Return the waits of some training steps, whose last keeps its routings for metrics; making a run is left out."""
    import torch

    with tempfile.TemporaryDirectory() as folder, fake_cuda() as waits:
        run = make_run(folder, changes, **more)
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


def balanced(changes: dict[str, Any]) -> list[str]:
    """The waits of steps in which images count by the frequency of their class."""
    with patch("softmoe.data.shapes.ShapesSource.labels", [0, 1, 1], create=True):
        return steps(changes)


def adapting(changes: dict[str, Any]) -> list[str]:
    """The waits of steps that train experts beside the MLPs of a saved model, and nothing else of it."""
    from softmoe.models import create_model
    from softmoe.storage import save_pretrained

    small = {"image_size": 16, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "num_classes": 5}
    with tempfile.TemporaryDirectory() as folder, real_files():
        save_pretrained(create_model("vit_ti4", **small), folder)
        return steps({"model.weights": folder, "model.adapters": True, "model.keep_mlp": True} | changes)


def on_ranks(expert: int, shard: int, changes: dict[str, Any]) -> list[str]:
    """The waits of steps and of a save on the first of four processes, whose messages go nowhere; what an optimizer
    that resumes gets is on the device too."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from softmoe.parallel import make_mesh
    from softmoe.storage.checkpoint import optimizer_targets, optimizer_tensors
    from softmoe.storage.weights import Spec
    from softmoe.train import run as of_run
    from softmoe.train.distributed import Team
    from softmoe.train.folder import RunFolder
    from softmoe.train.loop import save

    build_model = of_run.build_model

    def on_device(*arguments: Any) -> Any:
        with torch.device("cuda"):  # FSDP moves what is not there, but fake tensors refuse to be
            return build_model(*arguments)

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    team = Team(0, 4, make_mesh(expert, shard, "cuda"))
    halves = patch("softmoe.parallel.experts.HALVES_FROM", {"cuda": 2})
    with tempfile.TemporaryDirectory() as folder, fake_cuda() as waits, real_meshes(), halves:
        config = settings(folder, {"data.batch_size": 16} | changes)
        with patch.object(of_run, "build_model", on_device):
            run = of_run.build(config, RunFolder.of(config), team=team)
        feed = run.data.feed(run.data.loader.batches(0), run.device)
        feed.batches = from_host(feed.batches)
        waits.clear()
        for _ in range(2):
            take_step(run, feed)
        check_places(run)
        check_save(run, save)
        specs = {name: Spec.of(tensor) for name, tensor in optimizer_tensors(run.optimizer).items()}
        targets = optimizer_targets(specs, run.optimizer)
        assert {tensor.device.type for tensor in targets.values()} == {"cuda"}
        return list(waits)


def few_shots() -> list[str]:
    """The waits of an evaluation by few shots in a run; what is done with features on the host is not looked at."""
    import numpy as np

    from softmoe.evaluate.probes import fewshot_evaluator
    from softmoe.storage.preprocessing import Preprocessing

    few = fewshot_evaluator("shapes?size=16&length=8", Preprocessing(image_size=(16, 16)))
    found = SimpleNamespace(accuracies={"data": {10: [0.0]}})
    host = patch("torch.Tensor.numpy", lambda tensor: np.zeros(tuple(tensor.shape)))
    with host, patch("softmoe.evaluate.probes.few_shot", lambda *_, **__: found):
        return evaluation({"evaluation.best": "fewshot/10shot"}, evaluators={"fewshot": few})


def evaluation(changes: dict[str, Any], **more: Any) -> list[str]:
    """The waits of an evaluation in a run, which must be none: numbers come one batch behind."""
    from softmoe.data import feed
    from softmoe.models.classification import Totals
    from softmoe.train.reporting import evaluate

    def fed_from_host(batches: Any, *given: Any) -> Any:
        return batches_on_device(from_host(batches), *given)

    batches_on_device = feed.batches_on_device
    with tempfile.TemporaryDirectory() as folder, fake_cuda() as waits:
        run = make_run(folder, changes, **more)
        rooms = ("softmoe.train.data", "softmoe.evaluate.features")
        host = [patch(f"{room}.batches_on_device", fed_from_host) for room in rooms]
        known = patch("softmoe.models.classification.check_labels"), patch.object(Totals, "numbers", no_numbers)
        with host[0], host[1], known[0], known[1]:  # what labels and counts are is not known here
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
        feed = run.data.feed(run.data.loader.batches(0), run.device)
        feed.batches = from_host(feed.batches)
        take_step(run, feed)
        waits.clear()
        check_save(run, save)
        return list(waits)


def resuming(changes: dict[str, Any]) -> list[str]:
    """The waits of the steps after a resume from a checkpoint that was written on a CPU."""
    from softmoe.train import train
    from softmoe.train.loop import resume

    with tempfile.TemporaryDirectory() as folder:
        begun = settings(folder, changes | {"steps": 2, "device": "cpu"})
        train(begun)
        with fake_cuda() as waits, real_files():
            run = make_run(folder, changes | {"steps": 2})
            run.config = replace(run.config, device="cpu")  # a run stays on its kind; what is read is the same
            resume(run)
            assert run.done.step == 2
            check_places(run)
            feed = run.data.feed(run.data.loader.batches(0), run.device)
            feed.batches = from_host(feed.batches)
            waits.clear()
            take_step(run, feed)
            return list(waits)


def make_model(experts: int) -> Any:
    from softmoe.models import VisionTransformer, model_config

    small = {"image_size": 16, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "num_classes": 5}
    return moved(VisionTransformer(model_config(f"soft_ti4_{experts}e", **small)).eval(), "cuda")


def prepared(experts: int, weights: str) -> Any:
    from softmoe.inference.prepared import LARGEST_ERROR, prepare

    with patch.dict(LARGEST_ERROR, {weights: 2.0}):  # what is read here is 1
        return prepare(make_model(experts), weights)  # pyright: ignore[reportArgumentType]


def preparing(weights: str, precision: str) -> list[str]:
    """The waits of a prepared model, whose operators are as many for 16 experts as for 4: there is no loop."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from softmoe.evaluate.inputs import compute_in

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    counts, found = [], []
    for experts in (4, 16):
        seen: list[str] = []
        with fake_cuda() as waits:
            model = compute_in(precision, prepared(experts, weights))  # pyright: ignore[reportArgumentType]
            assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
            images = torch.empty(3, 3, 16, 16, device="cuda")
            waits.clear()
            with torch.inference_mode(), Operators():
                model(images)
            counts.append(len(seen))
            found += waits
    assert counts[0] == counts[1] > 0, counts
    return found


def answering() -> list[str]:
    """The waits of an answer of the service beside those that there must be: images go there, classes and features
    come back to somebody who waits for them."""
    import numpy as np
    import torch

    from softmoe.evaluate.classify import Predictor
    from softmoe.evaluate.inputs import Loaded, compute_in

    saved = SimpleNamespace(classes=tuple("abcde"), folder=Path(), fingerprint="", provenance={})
    with fake_cuda() as waits, patch("torch.Tensor.numpy", lambda tensor: np.zeros(tuple(tensor.shape))):
        loaded = Loaded(compute_in("auto", prepared(4, "int8")), saved, SimpleNamespace(image_size=(16, 16)))  # pyright: ignore[reportArgumentType]
        predictor = Predictor(loaded, top=2)
        images = torch.empty(3, 3, 16, 16)
        waits.clear()
        assert len(predictor.predict(["x"] * 3, images)) == 3
        ways = [wait.split(" at ")[0] for wait in waits]
        return [] if ways == ["copy from cpu to cuda", *["copy from cuda to cpu"] * 2] else list(waits)


def exporting() -> list[str]:
    """Constants of an exported program that are not on the device, which must be none."""
    import torch

    from softmoe.inference.export import trace
    from softmoe.inference.prepared import prepare

    with fake_cuda(), torch.no_grad():
        model, images = prepare(make_model(4), copy_weights=False), torch.empty(3, 3, 16, 16, device="cuda")
        program = unwatched(trace, model, images)
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        assert len(tensors) > 50
        return [name for name, tensor in tensors.items() if tensor.device.type != "cuda"]


def waits_on_purpose() -> list[str]:
    import torch

    with fake_cuda() as waits:
        x = torch.ones(2, device="cuda")
        float(x.sum())
        x.cpu().to("cuda", non_blocking=True)  # not from pinned memory
        torch.cuda.synchronize()
        torch.cuda.Event().record()
        return list(waits)


ROUTERS = ("tokens_choice", "experts_choice", "identity", "uniform", "soft_uniform", "uniform_soft")
IN_BACKWARD, COMPACT = {"optim.in_backward": True, "optim.clip_norm": None}, {"optim.states": "bfloat16"}
LOCKED, FEW = TEXT | {"model.locked": True}, {"data.train": "shapes?size=16&length=20"}
CASES: dict[str, Callable[[], list[str]]] = {
    "softmax": partial(steps, {"objective.label_smoothing": 0.1}),
    "sigmoid": partial(steps, {"objective.loss": "sigmoid"}),
    "mixup, mirrored": partial(steps, {"data.transform.mixup": 0.8, "data.transform.flip": True}),
    "cutmix, erased": partial(steps, {"data.transform.cutmix": 1.0, "data.transform.erase": 1.0}),
    "balanced": lambda: balanced({"objective.balance": 0.9}),
    "beside the MLP": partial(steps, {"model.keep_mlp": True, "model.drop_path": 0.1, "precision": "auto"}),
    "logits only": partial(steps, {"keep_logits_only": True, "precision": "auto"}),
    **{name: partial(steps, {"model.router": name}) for name in ROUTERS},
    "placed": partial(steps, {"model.router": "placed", "model.frame": True}),
    "bfloat16": partial(steps, {"precision": "auto", "model.dropout": 0.1}),
    "exact": partial(steps, {"precision": "exact", "model.router": "tokens_choice"}),
    "compiled": partial(steps, {"precision": "auto"}, compiled=True),
    "shards": partial(on_ranks, 1, 2, {}),
    "owned experts": partial(on_ranks, 2, 1, {"precision": "auto"}),
    "owned pieces": partial(on_ranks, 2, 4, {"precision": "auto", "ema": 0.9}),
    "all in one": partial(on_ranks, 4, 4, {"accumulate": 2, **COMPACT}),
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
    "kept features": partial(steps, LOCKED | FEW, extract=no_features),
    "adapters": partial(adapting, {"precision": "auto"}),
    "frozen, layer decay": partial(steps, COMPACT | {"optim.layer_decay": 0.7, "optim.lr_patterns": [["^embed", 0.0]]}),
    "own objective": partial(steps, {"accumulate": 2}, objective=own_objective),
    "evaluation": partial(evaluation, {}),
    "evaluation in bfloat16": partial(evaluation, {"precision": "auto", "ema": 0.9}),
    "evaluation of captions": partial(evaluation, TEXT),
    "evaluation of kept features": partial(evaluation, LOCKED | FEW, extract=no_features),
    "few shots": few_shots,
    "saving": partial(saving, {"ema": 0.9}),
    "resuming": partial(resuming, {}),
    "resuming compact moments": partial(resuming, COMPACT | {"ema": 0.9}),
    **{f"prepared {w}, {p}": partial(preparing, w, p) for w in ("bfloat16", "int8") for p in ("float32", "auto")},
    "answering": answering,
    "exporting": exporting,
    "waits": waits_on_purpose,
    "names": lambda: list(CASES),
}


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
