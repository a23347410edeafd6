"""Put parallelism on a model from outside. The model's code, and the names of its parameters, stay as they are.

The batch is split over all W ranks. Two numbers say where the weights are:

    expert   E consecutive ranks own the experts together, N/E each, and exchange slots
    shard    S consecutive ranks keep all other weights together, 1/S each (FSDP); 1 keeps a copy on every rank

Experts have W/E sets of owners. Where S is larger than E, each expert is also cut in S/E pieces among the ranks that
own the same experts; so there may be more ranks than experts, and memory still falls with every rank.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from softmoe.accelerate.torch_private import set_timeout
from softmoe.budget.plan import Layout
from softmoe.models import TwoTower, VisionTransformer, ViTConfig
from softmoe.models.transformer import Block
from softmoe.moe import Experts, MoE, SparseConfig
from softmoe.parallel.experts import OwnedExperts, draw_part
from softmoe.parallel.reduce import is_spread, local, mean_over_ranks


@dataclass(frozen=True)
class Mesh:
    sizes: Layout
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
    sizes = Layout(dist.get_world_size(), expert, shard)
    sizes.check()
    experts = init_device_mesh(
        device_type, (sizes.copies, sizes.pieces, expert), mesh_dim_names=("copies", "pieces", "expert")
    )
    rest = init_device_mesh(device_type, (sizes.world // shard, shard), mesh_dim_names=("replicate", "shard"))
    if timeout is not None:
        for group in (*experts.get_all_groups(), *rest.get_all_groups()):
            set_timeout(group, timeout)
    return Mesh(sizes, experts, rest)


AnyModel = TypeVar("AnyModel", bound=VisionTransformer | TwoTower)


@contextmanager
def building(mesh: Mesh, **options: Any) -> Iterator[None]:
    """Make models that are built in this context keep only this rank's part of each block as soon as it is made.

    No process ever holds more than one block without its experts, and one expert. Call `apply` afterwards, with the
    same options. All ranks draw the same numbers as without this context.

    Experts are made on the meta device. When the last of their parameters is made they are drawn expert by expert, and
    each rank keeps its part, which becomes their parameters when the block is spread.
    """
    owns = mesh.sizes.expert > 1

    def on_meta(part: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if type(part) is not Experts or parameter is None or is_spread(parameter):
            return None
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"))
        if name == "b2":
            if owns:
                mesh.sizes.check_experts(part.num_experts, part.dim, part.hidden_dim)
            like = dict(part.named_parameters()) | {name: empty}
            object.__setattr__(part, "drawn", draw_part(part, like, lambda shape: part_of_experts(shape, mesh)))
        return empty

    def keep_mine(layer: nn.Module, name: str, part: nn.Module | None) -> nn.Module | None:
        if isinstance(layer, MoE) and type(part) is Experts:
            drawn = part.__dict__.pop("drawn")
            if part.zero_output:
                drawn["w2"].zero_()
                drawn["b2"].zero_()
            part = OwnedExperts(part, mesh.experts["expert"]) if owns else part
            object.__setattr__(part, "drawn", drawn)
            return part
        if isinstance(layer, nn.ModuleList) and isinstance(part, Block):
            _spread_block(part, mesh, **options)
            _fill_experts(part, mesh)
        return None

    if mesh.sizes.world == 1:
        yield
        return
    hooks = (
        register_module_parameter_registration_hook(on_meta),  # pyright: ignore[reportArgumentType]
        register_module_module_registration_hook(keep_mine),  # pyright: ignore[reportArgumentType]
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def part_of_experts(shape: torch.Size, mesh: Mesh) -> tuple[slice, ...]:
    """Return this rank's part of a stacked tensor of all experts, as `_spread_block` cuts it."""
    if mesh.sizes.expert > 1:
        cuts = {0: mesh.experts["expert"]} | ({1: mesh.experts["pieces"]} if mesh.sizes.pieces > 1 else {})
    else:
        cuts = {even_axis(shape, mesh.sizes.shard): mesh.rest["shard"]}
    slices = [slice(0, size) for size in shape]
    for axis, ranks in cuts.items():
        each = -(-shape[axis] // ranks.size())
        slices[axis] = slice(*(min(shape[axis], (ranks.get_local_rank() + end) * each) for end in (0, 1)))
    return tuple(slices)


@torch.no_grad()
def _fill_experts(block: Block, mesh: Mesh) -> None:
    """Give experts that are spread on the meta device memory for their part, and what was drawn for it."""
    device = mesh.rest.device_type
    block._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.device.type == "meta" else tensor)
    for layer in moe_layers(block):
        for name, values in layer.experts.__dict__.pop("drawn", {}).items():
            local(getattr(layer.experts, name)).copy_(values)


def apply(model: AnyModel, mesh: Mesh, *, dtype: torch.dtype | None = None, compile: bool | str = False) -> AnyModel:
    """Spread `model`, the same on every rank, over the mesh, in place.

    `dtype` is what weights are sent in (bfloat16: half of the traffic); those of routers, all gradients and what is
    kept stay float32. `compile` compiles each block by itself, with the backend of that name or torch's own.

    Each rank then gives its share of the batch to the model and calls backward on the mean loss of that share. The
    gradients are those of the mean over all ranks, which is the mean of the whole batch where the shares are equal.
    Make the optimizer after this: the parameters are new ones.
    """
    check_model(model, mesh.sizes)
    sizes = mesh.sizes
    if sizes.world == 1:
        return model
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        if not isinstance(block, FSDPModule):  # else it was spread when it was built
            _spread_block(block, mesh, dtype=dtype, compile=compile)
    for scalar in (parameter for parameter in model.parameters() if parameter.ndim == 0):
        if scalar.requires_grad:  # FSDP shards no scalars: every rank keeps them
            scalar.register_post_accumulate_grad_hook(_average_gradient)
    fully_shard(model, **_options(model, mesh, dtype))
    return model


def _spread_block(block: Block, mesh: Mesh, *, dtype: torch.dtype | None = None, compile: bool | str = False) -> None:
    """Give each rank its part of one block."""
    sizes = mesh.sizes
    # experts and routers return views, which nobody writes into
    known = r"FSDP2-wrapped module \(FSDP(OwnedExperts|.*Router)\) returned a view tensor"
    warnings.filterwarnings("ignore", message=known)
    if sizes.expert > 1:
        for layer in moe_layers(block):
            if not isinstance(layer.experts, OwnedExperts):
                layer.experts = OwnedExperts(cast(Experts, layer.experts), mesh.experts["expert"])
            if sizes.world > sizes.expert:  # several owners of the same experts: cut the second axis, or keep copies
                fully_shard(
                    layer.experts, mesh=mesh.owners, shard_placement_fn=lambda _: Shard(1), mp_policy=_policy(dtype)
                )
    if dtype is not None:
        for layer in moe_layers(block):  # routers' weights are sent unrounded, since logits are compared
            if any(parameter.ndim for parameter in layer.router.parameters()):
                fully_shard(layer.router, **_options(layer.router, mesh, None))
    if compile:
        backend = "inductor" if compile is True else compile
        owns = sizes.expert > 1 and moe_layers(block)
        for part in (block.attention, *(layer.router for layer in moe_layers(block))) if owns else (block,):
            setattr(part, "forward", torch.compile(part.forward, backend=backend))  # noqa: B010  # of any signature
    fully_shard(block, **_options(block, mesh, dtype))


def _options(module: nn.Module, mesh: Mesh, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the options of FSDP. It leaves alone scalars, and experts that have one owner."""
    alone = mesh.sizes.expert == mesh.sizes.world
    experts = [part for part in module.modules() if alone and isinstance(part, OwnedExperts)]
    owned = {parameter for part in experts for parameter in part.parameters()}
    return {
        "mesh": mesh.others,
        "ignored_params": owned | {parameter for parameter in module.parameters() if parameter.ndim == 0},
        "shard_placement_fn": lambda parameter: Shard(even_axis(parameter.shape, mesh.sizes.shard)),
        "reshard_after_forward": True,  # also the outermost: an averaged model runs forward only, with new weights
        "mp_policy": _policy(dtype),
    }


def _policy(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return FSDP's precision: weights sent in `dtype`, gradients added up in float32, tokens left to autocast."""
    if dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def reduce_gradients(model: nn.Module, mesh: Mesh, now: bool) -> None:
    """Set whether the next backward pass adds gradients up over the ranks; of an accumulated step the last part does.

    Shards are always added up within one copy of the model: else every rank would hold the whole gradient.
    """
    assert isinstance(model, FSDPModule)
    if mesh.sizes.shard == 1:
        model.set_requires_gradient_sync(now)
    else:
        model.set_requires_all_reduce(now)


def even_axis(shape: torch.Size, parts: int) -> int:
    """Return the first axis that can be cut evenly.

    Else 0, which is padded: a position table (1, M, D) cut there on 256 ranks would be gathered as 256 tables.
    """
    return next((axis for axis, size in enumerate(shape) if size % parts == 0), 0)


def _average_gradient(parameter: Tensor) -> None:
    """Average a gradient over all ranks. With accumulation the older part is averaged again, which changes nothing."""
    assert parameter.grad is not None
    parameter.grad = mean_over_ranks(parameter.grad)


def moe_layers(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def check_model(model: nn.Module, sizes: Layout) -> None:
    """Raise ValueError, before anything is changed, for experts that cannot be shared out on these ranks."""
    sizes.check()
    if sizes.expert == 1:
        return
    for layer in moe_layers(model):
        if not isinstance(layer.experts, Experts):
            raise ValueError(f"only softmoe.moe.Experts can be owned by ranks, got {type(layer.experts).__name__}")
        sizes.check_experts(layer.experts.num_experts, layer.experts.dim, layer.experts.hidden_dim)


def check_groups(config: ViTConfig, images: int) -> None:
    """Raise ValueError if routing groups would span ranks, where the result would not be that of one process."""
    router = config.moe and config.moe.router
    size = router.group_size if isinstance(router, SparseConfig) else None
    if size is not None and images * config.tokens % size:
        raise ValueError(
            f"routing groups of {size} tokens do not fit the {images} images x {config.tokens} tokens of a rank: "
            f"take a group_size that divides {images * config.tokens}, or None for one image"
        )
