"""Choose the first parameters of an upcycled model's routers from the tokens that reach them.

Letters: B images, M tokens, D width, S slots (experts times slots per expert), T tokens of all images.

All experts start as the same MLP f, so a layer gives token i  y_i = sum_s C_is f(sum_j D_js x_j), which is f(x_i) if
each token comes back from a slot that holds that token alone. Two ways to get near, both linear in the token:

    centers     slot s looks for the s-th of S clusters of tokens (spherical k-means): like tokens share a slot
    positions   slot s looks for the s-th place in the image: ridge regression of the place on the token. Each image
                has each place once, so with a slot for each of the M tokens a regression that never errs gives every
                token its own slot: the dense model exactly, as the scale grows

The scale of the logits is then chosen, by trying, to be nearest to the dense MLP on these tokens. `refine` goes on from
there by gradient descent on the router alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.models import VisionTransformer
from softmoe.models.transformer import MLP, Block
from softmoe.moe import ExpertsBeside, MoE, Router, SoftRouter
from softmoe.moe.soft import l2_normalize
from softmoe.moe.sparse import SparseRouter
from softmoe.transfer.mlps import is_split, returns_shape

SCALES = tuple(2.0**power for power in range(13))  # 1 to 4096
ROUNDS = 20  # of k-means; clusters hardly change after these
STEPS, RATE, IMAGES = 100, 0.01, 16  # of refining: Adam steps, rate relative to the parameters' size, images a step
RIDGE = 1e-3  # regularization, in mean variances of a coordinate
MIXED = 0.1  # relative change of an image's tokens, when it is run alone, that rounding does not explain
OUTPUTS = ("logits", "image_embeds", "pooler_output", "last_hidden_state")  # the first that there is is compared


def fit_routers(
    dense: VisionTransformer, model: VisionTransformer, images: Tensor, init: str, report: Callable[[str], None]
) -> None:
    """Set the routers layer after layer, each on the tokens that reach it through the layers already set."""
    x_BMD, grid = encoder_input(model, images), model.embed.grid(images.shape[2], images.shape[3])
    for index, block in enumerate(model.encoder.blocks):
        assert isinstance(block, Block)
        if isinstance(block.mlp, MoE) and can_start_near(block.mlp.router):
            report(f"block {index}: setting the router on {len(images)} images")
            init_router(block.mlp, mlp_of(dense, index), block.norm2(block.attend(x_BMD)), init)
        x_BMD = block(x_BMD, None, grid)


def encoder_input(model: VisionTransformer, images: Tensor) -> Tensor:
    """Return patches with their positions, (B, M, D)."""
    caught: list[Tensor] = []
    hook = model.encoder.register_forward_pre_hook(lambda module, given: caught.append(given[0]))
    try:
        model.forward_features(images)
    finally:
        hook.remove()
    return caught[0]


def mlp_of(model: VisionTransformer, index: int) -> MoE | MLP:
    block = model.encoder.blocks[index]
    assert isinstance(block, Block)
    assert isinstance(block.mlp, MoE | MLP)
    return block.mlp


def init_router(layer: MoE, mlp: nn.Module, x_BMD: Tensor, init: str) -> None:
    """Choose the router's first parameters from the tokens that reach it, in the way that `init` names.

    Layers of half precision are tried in float32: a regression needs it, and so do errors that are close together.
    """
    if init == "copy" or not can_start_near(layer.router):
        return
    if not x_BMD.isfinite().all():
        raise ValueError(
            "routers start from finite tokens, but some are infinite or not a number: look at the images and the "
            "model's precision"
        )
    beside = isinstance(layer, ExpertsBeside)  # its experts give zero at first: the slots should just tell tokens apart
    tried, target = (MoE(layer.router, nn.Identity()), nn.Identity()) if beside else (layer, mlp)
    dtype = next(layer.router.parameters()).dtype
    if dtype.itemsize < torch.float32.itemsize:
        dtype = torch.float32
        tried, target = deepcopy(tried).to(dtype), deepcopy(target).to(dtype)
    x_BMD = x_BMD.to(dtype)
    with torch.autocast(x_BMD.device.type, enabled=False):
        start_near(tried, target, x_BMD, tuple(WAYS) if beside or init == "closest" else (init,))
        if init == "closest":
            refine(tried, target, x_BMD)
    set_parameters(layer.router, dict(tried.router.named_parameters()))


def can_start_near(router: Router) -> bool:
    """Tell if the router has parameters to choose: fixed routers have none."""
    return type(router) is SoftRouter or isinstance(router, SparseRouter)


def start_near(layer: MoE, mlp: Callable[[Tensor], Tensor], x_BMD: Tensor, ways: tuple[str, ...]) -> None:
    """Set the router so that the layer is as near to `mlp` on these tokens as the best of `ways` and scales gets."""
    target_BMD = mlp(x_BMD)
    best, chosen = float("inf"), None
    for way in ways:
        directions_DS = WAYS[way](x_BMD, slot_count(layer.router))
        for parameters in candidates(layer.router, directions_DS, x_BMD):
            set_parameters(layer.router, parameters)
            error = float((layer(x_BMD) - target_BMD).norm())
            if error < best:
                best, chosen = error, parameters
    assert chosen is not None
    set_parameters(layer.router, chosen)


def refine(layer: MoE, mlp: Callable[[Tensor], Tensor], x_BMD: Tensor) -> None:
    """Move a soft router towards the layer nearest to `mlp`; where that does not help it stays as it was."""
    router = layer.router
    if not isinstance(router, SoftRouter):
        return
    target_BMD = mlp(x_BMD)
    before, error = {name: p.clone() for name, p in router.named_parameters()}, (layer(x_BMD) - target_BMD).norm()
    groups = [{"params": [p], "lr": RATE * float(p.norm() / p.numel() ** 0.5)} for p in router.parameters()]
    optimizer = torch.optim.Adam(groups)
    for _ in range(STEPS):
        some = torch.randperm(len(x_BMD), device=x_BMD.device)[:IMAGES]
        with torch.enable_grad():
            loss = (layer(x_BMD[some]) - target_BMD[some]).square().sum() / target_BMD[some].square().sum()
            gradients = torch.autograd.grad(loss, list(router.parameters()))
        for parameter, gradient in zip(router.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    optimizer.zero_grad()
    if not (layer(x_BMD) - target_BMD).norm() < error:
        set_parameters(router, before)


def slot_count(router: Router) -> int:
    """Return S; a sparse router has one direction for each expert."""
    return router.num_experts * router.slots_per_expert if isinstance(router, SoftRouter) else router.num_experts


def candidates(router: Router, directions_DS: Tensor, x_BMD: Tensor) -> Iterator[dict[str, Tensor]]:
    """List the router's parameters for each scale, in mean token lengths where tokens are not normalized."""
    unit_DS = l2_normalize(directions_DS, dim=0)
    for scale in SCALES:
        if isinstance(router, SoftRouter) and router.scale is not None:
            short_DS = unit_DS * router.num_experts**-0.5  # as long as fresh ones: Adam turns them as fast
            yield {"phi": short_DS.view_as(router.phi), "scale": torch.tensor(scale)}
        else:
            weight_DS = unit_DS * scale / x_BMD.norm(dim=-1).mean()
            yield {"phi": weight_DS.view_as(router.phi)} if isinstance(router, SoftRouter) else {"weight": weight_DS}


def set_parameters(router: Router, parameters: dict[str, Tensor]) -> None:
    for name, value in parameters.items():
        getattr(router, name).data.copy_(value)


def cluster_centers(x_BMD: Tensor, count: int) -> Tensor:
    """Return (D, count) directions: the centers of clusters of tokens."""
    return spherical_k_means(l2_normalize(x_BMD.flatten(0, 1), dim=-1), count).T


def place_directions(x_BMD: Tensor, count: int) -> Tensor:
    """Return (D, count) directions: the regression of each place on its token.

    With more places than slots, places with like tokens form groups; with more slots than places they begin again."""
    x_BMD = l2_normalize(x_BMD, dim=-1)
    B, M, D = x_BMD.shape
    mean_MD = x_BMD.mean(0)
    groups = min(count, M)
    group_M = torch.arange(M) if groups == M else nearest(mean_MD, spherical_k_means(mean_MD, groups))
    member_MG = torch.nn.functional.one_hot(group_M, groups).to(x_BMD)
    size_G = member_MG.sum(0).clamp(min=1)
    centered_GD = member_MG.T @ mean_MD / size_G[:, None] - mean_MD.mean(0)
    x_TD = x_BMD.flatten(0, 1)
    moment_DD = x_TD.T @ x_TD / (B * M)  # not centered: there is no intercept, and slots are compared with each other
    ridge = RIDGE * moment_DD.diagonal().mean() * torch.eye(D).to(moment_DD)
    directions_DG = torch.linalg.solve(moment_DD + ridge, centered_GD.T)
    return directions_DG[:, torch.arange(count) % groups]


WAYS = {"centers": cluster_centers, "positions": place_directions}


def spherical_k_means(points_TD: Tensor, count: int) -> Tensor:
    """Return (count, D) directions of clusters; they start from points drawn at random, and empty ones are redrawn."""
    T, D = points_TD.shape
    if count > T:
        raise ValueError(f"{count} slots need at least as many tokens to be drawn from, got {T}: give more images")
    centers_SD = points_TD[torch.randperm(T)[:count]]
    for _ in range(ROUNDS):
        nearest_T = nearest(points_TD, centers_SD)
        sums_SD = torch.zeros_like(centers_SD).index_add_(0, nearest_T, points_TD)
        empty_S = torch.bincount(nearest_T, minlength=count) == 0
        sums_SD[empty_S] = points_TD[torch.randperm(T)[: int(empty_S.sum())]]
        centers_SD = l2_normalize(sums_SD, dim=-1)
    return centers_SD


def nearest(points_TD: Tensor, centers_SD: Tensor) -> Tensor:
    """Return (T,): for each point the center with which its product is largest."""
    return (points_TD @ centers_SD.T).argmax(1)


def first_argument(given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Return the tokens among the arguments of a module: the first tensor, by whatever name."""
    return next(part for part in (*given, *named.values()) if isinstance(part, Tensor))


def first_tensor(batch: Any) -> Tensor:
    """Return the tensor of a batch whose first axis counts its images."""
    parts = batch.values() if isinstance(batch, Mapping) else batch[:1] if isinstance(batch, tuple | list) else [batch]
    for part in parts:
        if isinstance(part, Tensor) and part.ndim:
            return part
    raise ValueError(
        "a batch must be a tensor, a tuple that begins with one, or a mapping of arguments with one, got a "
        f"{type(batch).__name__}"
    )


def of_other_size(batch: Any) -> Any:
    """Return an input of the model with the first image alone, or twice if it has just one."""
    B = len(first_tensor(batch))

    def change(part: Any) -> Any:
        if not isinstance(part, Tensor) or not part.ndim or len(part) != B:
            return part
        return part[:1] if B > 1 else torch.cat([part, part])

    if isinstance(batch, Mapping):
        return {name: change(part) for name, part in batch.items()}
    return change(first_tensor(batch))


def catch(model: nn.Module, names: Iterable[str], batches: list[Any]) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Return the inputs of each module, one for each batch, and the model's outputs."""
    caught: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = []
    for name, kept in caught.items():
        module = model.get_submodule(name)
        split = is_split(module)

        def keep(
            module: nn.Module, given: Any, named: Any, output: Any, kept: list[Tensor] = kept, name: str = name,
            split: bool = split,
        ) -> None:  # fmt: skip
            x = first_argument(given, named)
            if x.ndim < 2 or not (split or returns_shape(output, x)):
                got = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
                raise ValueError(
                    f"{name} gets {tuple(x.shape)} and returns {got}: mlps= must name modules that take (images, "
                    "tokens, width) and return the same shape, alone or first in a tuple"
                )
            kept.append(x)

        target = module.intermediate if split else module
        hooks.append(target.register_forward_hook(keep, with_kwargs=True))  # pyright: ignore
    try:
        outputs = [model_output(model, batch) for batch in batches]
    finally:
        for hook in hooks:
            hook.remove()
    for name, kept in caught.items():
        if len(kept) != len(batches):
            raise ValueError(
                f"{name} ran {len(kept)} times in {len(batches)} batches: name modules that run once each"
                + ("" if kept else "; a compiled model is upcycled before it is compiled")
            )
    return caught, outputs


def find_tokens_first(model: nn.Module, caught: dict[str, list[Tensor]], batch: Any) -> bool:
    """Tell if tokens come before images in the modules' inputs: see which axis changes with the number of images."""
    advice = "give tokens_first=True if they are (tokens, images, width), and else False"
    other = of_other_size(batch)
    counts = len(first_tensor(batch)), len(first_tensor(other))
    try:
        alone, _ = catch(model, caught, [other])
    except Exception as error:  # of any kind: the model is anybody's
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the model runs {counts[0]} images, but not {counts[1]} ({why}): {advice}") from error
    found = {}
    for name, (x, *_) in caught.items():
        y = alone[name][0]
        axis = images_axis(x, y, *counts)
        if axis is None:
            shapes = f"{tuple(x.shape)} for {counts[0]} images and {tuple(y.shape)} for {counts[1]}"
            raise ValueError(f"the inputs of {name} are {shapes}, which does not tell the axis of images: {advice}")
        some, same = (t.narrow(axis, 0, min(x.shape[axis], y.shape[axis])).cpu().double() for t in (x, y))
        if (some - same).norm() > MIXED * same.norm():
            why = "the first axis of batches is not that of images, or the model draws at random"
            raise ValueError(f"the inputs of {name} for an image change when it runs alone, so {why}: {advice}")
        found[name] = axis == 1
    if len(set(found.values())) > 1:
        first, last = (next(name for name in found if found[name] is kind) for kind in (True, False))
        raise ValueError(f"tokens come first in {first}, but not in {last}: call upcycle_ once for each kind")
    return any(found.values())


def images_axis(x: Tensor, y: Tensor, images: int, others: int) -> int | None:
    """Return the axis of images in inputs of a module for two numbers of them, or None if it cannot be told.

    It is the first, which may count several windows of each image, or the second of three, which may not: tokens of
    all images in one sequence would look the same.
    """
    axes = [axis for axis, size in enumerate(x.shape) if x.ndim == y.ndim and size != y.shape[axis]]
    if axes == [0] and x.shape[0] * others == y.shape[0] * images:
        return 0
    return 1 if axes == [1] and x.ndim == 3 and (x.shape[1], y.shape[1]) == (images, others) else None


def model_output(model: nn.Module, batch: Any) -> Tensor:
    """Run the model on a batch and return its output (B, ...): of several tensors the logits, or else the first."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(batch[0] if isinstance(batch, tuple | list) else batch)
    parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    if isinstance(output, tuple | list | Tensor):
        parts = dict(enumerate([output] if isinstance(output, Tensor) else output))
    tensors = {key: part for key, part in parts.items() if isinstance(part, Tensor)}
    found = next((tensors[key] for key in (*OUTPUTS, *tensors) if key in tensors), None)
    if found is None or not found.ndim:
        got = f"a {type(output).__name__} without one" if found is None else "a single number, such as a loss"
        raise ValueError(f"the model must return a tensor with an output for each image, which are compared, got {got}")
    return found
