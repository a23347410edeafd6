"""What ranks do in the tests, and the same thing in one process.

Everything is float64 and tiny: 8 images of 8 pixels in patches of 2 (16 tokens), width 8, 4 experts.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from parallel.dry_run import Sent
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from softmoe import parallel
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.models.classification import class_weights, softmax_cross_entropy
from softmoe.moe import Experts
from softmoe.moe.record import Recording
from softmoe.parallel import experts, spread
from softmoe.storage import shards
from softmoe.storage.checkpoint import (
    Checkpoint,
    copy_tensors,
    optimizer_tensors,
    read_checkpoint,
    restore,
    tensor_specs,
)
from softmoe.storage.shards import write_parts, write_sharded
from softmoe.train import OptimSection
from softmoe.train.optim import gradients, make_optimizer, set_learning_rate

BATCH, CLASSES, STEPS = 8, 5, 3
ROUTERS: dict[str, dict[str, Any]] = {
    "soft": {"slots_per_expert": 3},
    "placed": {"slots_per_expert": 3, "frame": True, "combine_place": False},
    "slots stay": {"router": "placed", "slots_per_expert": 3, "slots_stay": True},
    "tokens_choice": {"top_k": 2, "gshard_weight": 0.01, "capacity_factor": 0.8, "noise_std": 0.0},
    "experts_choice": {"capacity_factor": 1.5, "noise_std": 0.0},
    "identity": {},
    "dense": {},
}


@dataclass
class Outcome:
    loss: float
    norm: float
    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    """After three steps."""


def make_model(router: str, *, num_experts: int = 4, seed: int = 0, **more: Any) -> VisionTransformer:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"router": router, "blocks": (0, 1), "num_experts": num_experts} | ROUTERS[router] | more
    moe = None if router == "dense" else MoEConfig.of(**options)
    config = ViTConfig(image_size=8, patch_size=2, width=8, depth=2, mlp_dim=12, heads=2, num_classes=CLASSES, moe=moe)
    model = VisionTransformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():  # nothing starts at zero, so that nothing is hidden
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.randint(CLASSES, (BATCH,), generator=generator)


def share(values: Tensor, rank: int, world: int) -> Tensor:
    return values.chunk(world)[rank]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def optimizer_of(model: VisionTransformer, name: Literal["adamw", "muon"] = "adamw") -> torch.optim.Optimizer:
    optimizer = make_optimizer(model, OptimSection(name, kernel_decay=0.1))
    set_learning_rate(optimizer, 0.01)
    return optimizer


def step_once(
    model: VisionTransformer, optimizer: torch.optim.Optimizer, tap: Recording, images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and output of this rank's share; gradients are left in the model, unclipped."""
    optimizer.zero_grad(set_to_none=True)
    tap.clear()
    with tap:
        output = model(images)
    loss = softmax_cross_entropy(output, class_weights(labels, CLASSES).double()).mean()
    auxiliary = tap.auxiliary_loss()
    loss = loss if auxiliary is None else loss + auxiliary
    loss.backward()
    return loss.detach(), output.detach()


def train_three_steps(
    model: VisionTransformer,
    rank: int = 0,
    world: int = 1,
    *,
    clip: float = 0.05,
    checkpointing: bool = False,
    optimizer: Literal["adamw", "muon"] = "adamw",
) -> Outcome:
    model.set_grad_checkpointing(checkpointing)
    updates, tap = optimizer_of(model, optimizer), Recording(model)
    first: dict[str, Any] = {}
    for step in range(STEPS):
        images, labels = (share(values, rank, world) for values in make_batch(step))
        images = images.clone().requires_grad_(True)
        loss, output = step_once(model, updates, tap, images, labels)
        loss = parallel.mean_over_ranks(loss)
        assert images.grad is not None
        if not first:
            named = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            first = {"loss": float(loss), "output": output, "input_gradient": images.grad / world, "gradients": named}
        norm = parallel.clip_by_global_norm(gradients(updates), clip)
        first.setdefault("norm", float(norm))
        updates.step()
    return Outcome(**first, weights={name: whole(value) for name, value in model.state_dict().items()})


def train_cases(rank: int, world: int, cases: list[tuple[str, int, int]]) -> dict[tuple[str, int, int], Outcome]:
    """One group of processes, every case (router, expert, shard) in turn: starting processes is what takes time."""
    meshes: dict[tuple[int, int], parallel.Mesh] = {}
    outcomes = {}
    for router, expert, shard in cases:
        mesh = meshes.setdefault((expert, shard), parallel.make_mesh(expert, shard))
        outcomes[router, expert, shard] = train_three_steps(parallel.apply(make_model(router), mesh), rank, world)
    return outcomes


@dataclass
class Start:
    weights: dict[str, Tensor]
    whole_blocks: list[int]
    """How many blocks are whole as each is added."""
    drawn: int
    """The most numbers that are drawn at once."""


def start_on_ranks(rank: int, cases: list[tuple[tuple[int, int], dict[str, Any]]]) -> list[Start]:
    """Spread models while they are built."""
    results = []
    for sizes, options in cases:
        mesh, blocks, whole_blocks, drawn = parallel.make_mesh(*sizes), [], [], []
        real, uniform = spread._spread_block, torch.nn.init.uniform_

        def note(block: Any, *given: Any, real=real, blocks=blocks, whole_blocks=whole_blocks, **options: Any) -> None:
            blocks.append(block)
            whole_blocks.append(sum(any(type(p) is Parameter and p.ndim for p in b.parameters()) for b in blocks))
            real(block, *given, **options)

        def draw(tensor: Tensor, *given: Any, uniform=uniform, drawn=drawn) -> Tensor:
            drawn.append(tensor.numel())
            return uniform(tensor, *given)

        noted = patch.object(spread, "_spread_block", note), patch("torch.nn.init.uniform_", draw)
        with noted[0], noted[1], parallel.building(mesh):
            model = fresh_model(**options)
        parallel.apply(model, mesh)
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        results.append(Start(weights, whole_blocks, max(drawn)))
    return results


def fresh_model(**options: Any) -> VisionTransformer:
    torch.manual_seed(3)
    moe = MoEConfig.of("soft", num_experts=4, blocks=(1, 2), **options)
    return VisionTransformer(
        ViTConfig(image_size=8, patch_size=2, width=8, depth=3, mlp_dim=12, heads=2, num_classes=CLASSES, moe=moe)
    )


def work_while_travelling(rank: int) -> tuple[list[int], list[int]]:
    """How many exchanges are under way when experts begin with each half, in the forward and in the backward pass."""
    under_way, forward, backward = [0], [], []
    begin, end, compute = experts.Exchange.begin, experts.Exchange.end, Experts.forward

    def begin_one(exchange: Any, rows: Tensor) -> Tensor:
        under_way[0] += 1
        return begin(exchange, rows)

    def end_one(exchange: Any) -> None:
        under_way[0] -= 1
        end(exchange)

    def compute_one(layer: Any, rows: Tensor) -> Tensor:
        forward.append(under_way[0])
        y = compute(layer, rows)
        y.register_hook(lambda _: backward.append(under_way[0]))
        return y

    mesh = parallel.make_mesh(dist.get_world_size())
    owned = experts.OwnedExperts(Experts(4, 8, 4), mesh.experts["expert"])
    with (
        patch.object(experts, "HALVES_FROM", {"cpu": 2}),
        patch.object(experts.Exchange, "begin", begin_one),
        patch.object(experts.Exchange, "end", end_one),
        patch.object(Experts, "forward", compute_one),
    ):
        owned(torch.randn(4, 6, 4, requires_grad=True)).sum().backward()
    assert under_way == [0]
    return forward, backward


OPTIONS = ("checkpointing", "frozen", "identity", "dense", "halves", "compiled", "muon")


def with_option(
    option: str, train: Callable[..., Outcome], mesh: parallel.Mesh | None = None, rank: int = 0
) -> Outcome:
    """Train a model that has something special, on `mesh` or in one process."""
    model = make_model(option if option in ROUTERS else "soft")
    names = {name: value.shape for name, value in model.state_dict().items()}
    if mesh is not None:
        model = parallel.apply(model, mesh, compile="aot_eager" if option == "compiled" else False)
        assert {name: value.shape for name, value in model.state_dict().items()} == names
    experts.HALVES_FROM = {"cpu": 2} if option == "halves" else {}
    if option == "frozen":  # after the sharding, as the optimizer does
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("blocks.0" not in name and "scale" not in name)
    world = 1 if mesh is None else mesh.sizes.world
    optimizer = "muon" if option == "muon" else "adamw"
    return train(model, rank, world, checkpointing=option == "checkpointing", optimizer=optimizer)


def train_with_options(rank: int, world: int) -> dict[str, Outcome]:
    mesh = parallel.make_mesh(2, 2)
    return {option: with_option(option, train_three_steps, mesh, rank) for option in OPTIONS}


def count_sent(rank: int, meshes: list[tuple[int, int]]) -> dict[tuple[int, int], dict[str, int]]:
    """Bytes through the collectives of one step, by kind."""
    counts = {}
    for expert, shard in meshes:
        mesh = parallel.make_mesh(expert, shard)
        model = parallel.apply(make_model("soft"), mesh)
        images = share(make_batch(0)[0], rank, mesh.sizes.world)
        with Sent() as sent:
            model(images).mean().backward()
        counts[expert, shard] = dict(sent.bytes)
    return counts


class Training:
    """A model and its optimizer that can be stopped, saved and loaded at any step, on a mesh or without."""

    def __init__(self, mesh: parallel.Mesh | None = None, rank: int = 0, *, seed: int = 0):
        model = make_model("soft", seed=seed)
        self.model = model if mesh is None else parallel.apply(model, mesh)
        self.optimizer, self.tap = optimizer_of(self.model), Recording(self.model)
        self.rank, self.world = rank, 1 if mesh is None else mesh.sizes.world

    def steps(self, *steps: int) -> "Training":
        for step in steps:
            images, labels = (share(values, self.rank, self.world) for values in make_batch(step))
            step_once(self.model, self.optimizer, self.tap, images, labels)
            parallel.clip_by_global_norm(gradients(self.optimizer), 0.05)
            self.optimizer.step()
        return self

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"model": self.model.state_dict(), "optimizer": optimizer_tensors(self.optimizer)}

    def save(self, folder: Path) -> "Training":
        """In the background, while training goes on with the next step."""
        copies = {name: copy_tensors(tensors) for name, tensors in self.tensors().items()}
        group = dist.new_group(backend="gloo")
        write = threading.Thread(target=write_sharded, args=(folder, 2, copies, {"state": {"step": 2}}, group))
        write.start()
        self.steps(2)
        write.join()
        return self

    def load(self, folder: Path, *, one_file: bool = False) -> "Training":
        end = ".safetensors" if one_file else ""
        specs = {name: tensor_specs(folder / f"{name}{end}") for name in ("model", "optimizer")}
        restore(
            Checkpoint(folder, 2, {}, specs),
            self.model,
            self.optimizer,
            group=dist.group.WORLD if self.world > 1 else None,
        )
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(value) for name, value in self.model.state_dict().items()}


def save_and_resume(
    rank: int, folder: Path, save: dict[str, tuple[int, int]], load: list[tuple[str, tuple[int, int]]]
) -> dict[Any, dict[str, Tensor]]:
    """Save two steps of training on some meshes, load checkpoints on others; weights after the third step of each."""
    meshes = {sizes: parallel.make_mesh(*sizes) for sizes in dict.fromkeys([*save.values(), *(m for _, m in load)])}
    results: dict[Any, dict[str, Tensor]] = {}
    for name, sizes in save.items():
        results[name] = Training(meshes[sizes], rank).steps(0, 1).save(folder / name).weights()
    for name, sizes in load:
        resumed = Training(meshes[sizes], rank, seed=9).load(folder / name, one_file=name == "one").steps(2)
        results[name, sizes] = resumed.weights()
    return results


def verify_and_fail(rank: int, folder: Path) -> dict[str, str]:
    """The messages of a damaged checkpoint, and of a save that fails on the second rank."""
    messages = {}
    try:
        read_checkpoint(folder / "two", dist.group.WORLD)
    except ValueError as error:
        messages["damaged"] = str(error)
    training = Training(parallel.make_mesh(2, 1), rank)
    if rank == 1:
        shards.write_parts = refuse  # the disk of this rank is full
    try:
        write_sharded(folder / "new", 1, training.tensors(), {})
    except OSError as error:
        messages["failed"] = str(error)
    return messages


def refuse(place: Path, tensors: object, group: object) -> None:
    write_parts(place, tensors, group)  # so that the others do not wait
    raise OSError("no room")
