"""Start a run from a trained model: fine-tuning, texts for locked images, and cooldown branches.

    config = transfer_config(recipe, "models/soft_s16", image_size=384)     the recipe, for that model's shape
    train(config)

Slots are learned vectors that do not know the number of tokens, so they are kept as they are: with more tokens per
image a Soft MoE costs less than its dense twin.

`refit_head` ends a run with a head in closed form: ridge regression of class tokens and means of the training images
after four blocks, of which the lower ones still know what the old task did not ask for.

A branch starts from a kept checkpoint of a run whose learning rate has not begun to cool down, and takes it to zero in
N steps, in a folder of its own: many training lengths from one long run, the paper's way. The first run is only read.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from softmoe.convert.foreign import from_pretrained, locate, open_foreign, split_options
from softmoe.data import Transform
from softmoe.evaluate.features import Features, extract
from softmoe.evaluate.inputs import random_subset
from softmoe.evaluate.ridge import BIAS, L2_GRID, Ridge, choose_by_leave_one_out
from softmoe.machine import choose_device
from softmoe.models import VisionTransformer, ViTConfig
from softmoe.models.classification import LOSSES, Loss, class_weights
from softmoe.models.registry import SIZES
from softmoe.storage import SavedModel, load_saved, open_saved, save_pretrained
from softmoe.storage.adapters import facts_of_base
from softmoe.storage.checkpoint import read_checkpoint
from softmoe.storage.files import whole_folder
from softmoe.storage.saved import TOKENIZER_FILES
from softmoe.train.config import ModelSection, TrainConfig
from softmoe.train.data import Data
from softmoe.train.distributed import Team
from softmoe.train.evaluation import classify, evaluate_share
from softmoe.train.folder import RunFolder, write_model
from softmoe.train.log import MetricsFile
from softmoe.train.loop import Result
from softmoe.train.reporting import best_entry, sort_key

ADAPTER_RATE = 5.0
"""Times the rate of a whole model: only new weights learn, and none that was trained can be lost."""


def transfer_config(
    config: TrainConfig, weights: str | Path, *, image_size: int | tuple[int, int] | None = None, adapters: bool = False
) -> TrainConfig:
    """Return `config` with the shape and weights of a saved model, for images of this size (None: the model's own).

    With `adapters` all weights stay as they are but the head and experts beside the MLPs, which are added to a model
    that has none: 16 of hidden width D / 32 in half of the blocks, fewer than 5 % of the weights of a ViT.
    """
    shape = from_pretrained(weights, "meta").config
    if adapters and locate(split_options(str(weights))[0]) is None:
        facts_of_base(weights)  # refuses adapters
    size = shape.image_size if image_size is None else image_size
    section = section_of(shape)
    if adapters:
        section = replace(section_with_adapters(section, shape, weights), adapters=True)
        config = replace(config, schedule=replace(config.schedule, peak=ADAPTER_RATE * config.schedule.peak))
    return replace(
        config,
        model=replace(section, weights=str(weights), new_head=config.model.new_head),
        data=replace(config.data, transform=replace(config.data.transform, image_size=size)),
    )


def section_with_adapters(section: ModelSection, shape: ViTConfig, weights: str | Path) -> ModelSection:
    if shape.moe is None:
        return section.change(router="soft", num_experts=16, expert_dim=adapter_dim(shape), keep_mlp=True)
    if not shape.moe.keep_mlp:
        raise ValueError(f"adapters stand beside MLPs, and {weights} has experts in their place: leave out --adapters")
    return section


def adapter_dim(shape: ViTConfig) -> int:
    """Return a hidden width with which 16 experts in half of the blocks are fewer than 5 % of a ViT's weights."""
    return max(1, shape.width // 32)


def locked_config(config: TrainConfig, image: str | Path) -> TrainConfig:
    """Return `config`, a recipe with a text tower, with a saved model as its locked image tower.

    Images are prepared as the saved model says.
    """
    if config.text.size is None:
        raise ValueError("--image is for recipes with a text tower, such as lit; softmoe finetune starts from a model")
    config = transfer_config(config, image)
    config = replace(config, model=replace(config.model, locked=True))
    p = (open_foreign(image) or open_saved(image)).preprocessing
    height, width = p.image_size
    size = height if height == width else p.image_size
    seen = {"image_size": size, "crop": p.crop, "central_ratio": p.central_ratio, "antialias": p.antialias}
    return replace(config, data=replace(config.data, transform=replace(config.data.transform, **seen)))


def section_of(shape: ViTConfig) -> ModelSection:
    """Return settings that resolve to `shape`, with the number of classes and the image size of the data."""
    sizes = (shape.width, shape.depth, shape.mlp_dim, shape.heads)
    letter = next((letter for letter, known in SIZES.items() if known == sizes), "s")
    given = {f.name: getattr(shape, f.name) for f in fields(ViTConfig)}
    moe = given.pop("moe")
    name = f"vit_{letter}{shape.patch_size}"
    if moe is not None:
        given |= moe.to_dict()
        name = f"{moe.router.name}_{letter}{shape.patch_size}_{moe.num_experts}e"
    del given["num_classes"], given["image_size"], given["head_blocks"]  # of the head, which may be new
    return ModelSection(name=name).change(**given)


REFIT_IMAGES = 20_000
"""The most images, drawn at random, that a head in closed form is fitted to."""
SCALE_IMAGES = 2_000
"""The most validation images, drawn at random, by which the scale of its logits is chosen."""
SCALES = tuple(2.0 ** (i / 2) for i in range(-4, 17))


def write_finished(result: Result) -> tuple[SavedModel, dict[str, float]]:
    """Write the model of a finished run, with a head in closed form if the settings ask for one; return its numbers.

    Where the run could not keep its last step, the head stays as it was learned.
    """
    model, (_, numbers), stored = write_model(result.folder), result.folder.chosen_numbers(), result.folder.stored()
    if stored is not None and stored[0].model.refit_head and not result.problems:
        numbers = numbers | refit_head(result.folder)
    return model, numbers


def refit_head(run: RunFolder, report: Callable[[str], None] = print) -> dict[str, float]:
    """Fit a head in closed form for the finished model of a run; save the model with it if validation is better.

    Returns the validation numbers of the model that is saved in the end. A quiet run reports nothing.
    """
    stored = run.stored()
    assert stored is not None
    config, (_, before) = stored[0], run.chosen_numbers()
    saved = open_saved(run.path / "model")
    device = choose_device(config.device)
    model = load_saved(saved, device)
    data, d = Data.open(config, device=device, captions=False), config.data
    widen_head(model, spread_blocks(saved.config.depth))
    prepare = Transform(d.transform, train=False)
    features, held_out = (
        extract(model, random_subset(source, images), prepare, batch_size=d.eval_batch_size, cache=False)
        for source, images in ((data.train, REFIT_IMAGES), (data.val, SCALE_IMAGES))
    )
    l2 = fit_head(model, features)
    scale_head(model, held_out, config.objective.loss)
    found = evaluate_share(partial(classify, loss=config.objective.loss), model, data, Team())
    numbers = {f"val/{name}": value for name, value in found.items()}
    better = sort_key(best_entry("val/top1", numbers)) > sort_key(best_entry("val/top1", before))
    said = (
        f"head in closed form on {len(features)} training images: top-1 {numbers['val/top1']:.4f} and loss "
        f"{numbers['val/loss']:.4f} on validation images, the trained one {before['val/top1']:.4f} and "
        f"{before['val/loss']:.4f}: {'the model gets the new head' if better else 'the trained head stays'}"
    )
    if not config.log.quiet:
        report(said)
    if not better:
        return before
    made = saved.provenance | {"results": numbers, "head": {"blocks": model.config.head_blocks, "l2": l2}}
    facts = {"preprocessing": saved.preprocessing, "classes": saved.classes}
    save_pretrained(model, run.path / "model", provenance=made, **facts)
    return numbers


def spread_blocks(depth: int) -> tuple[int, ...]:
    """Return four blocks from the middle to the last, counted from 0: 5, 7, 9 and 11 of twelve."""
    return tuple(sorted({max(1, round(depth * part / 6)) - 1 for part in (3, 4, 5, 6)}))


def widen_head(model: VisionTransformer, blocks: tuple[int, ...]) -> None:
    """Give the model a new head that also gets the outputs of these blocks."""
    model.config = replace(model.config, head_blocks=blocks)
    model.reset_classifier(model.num_classes)


def fit_head(model: VisionTransformer, features: Features) -> float:
    """Set the head to the ridge regression of these features and return its penalty.

    The penalty is that of the best accuracy with each image left out in turn.
    """
    ridge = Ridge.fit(features.vectors, features.single_labels(), len(features.classes))
    l2 = choose_by_leave_one_out(ridge, L2_GRID)
    W_DC = ridge.weights(l2)
    weight_DC = W_DC[:-1] / ridge.std_D[:, None]
    bias_C = BIAS * W_DC[-1] - ridge.mean_D @ weight_DC
    head = linear_head(model)
    with torch.no_grad():
        for own, found in ((head.weight, weight_DC.T), (head.bias, bias_C)):
            own.copy_(torch.from_numpy(found))
    return l2


@torch.no_grad()
def scale_head(model: VisionTransformer, features: Features, loss: Loss = "softmax") -> None:
    """Multiply the head by the factor with the smallest loss on images that nothing was trained on.

    Images that the blocks were trained on would make it too sure. So would a few images that are all right, and the
    loss is therefore that of one more image, which can be of any class.
    """
    head, labels_n = linear_head(model), torch.from_numpy(features.single_labels()).long()
    scores_nC = head(torch.from_numpy(np.array(features.vectors)).to(head.weight)).cpu()
    targets_nC = class_weights(labels_n, scores_nC.shape[1], smoothing=1 / (len(labels_n) + 1))
    losses = [LOSSES[loss](scale * scores_nC, targets_nC).mean() for scale in SCALES]
    factor = SCALES[int(torch.stack(losses).argmin())]
    for own in (head.weight, head.bias):
        own.mul_(factor)


def linear_head(model: VisionTransformer) -> nn.Linear:
    assert isinstance(model.head, nn.Linear), "a model without classes has none"
    return model.head


def branch(checkpoint: Path | str, cooldown: int, run_name: str | None = None, runs: str | None = None) -> TrainConfig:
    """Prepare the folder of the branch and return its settings: `train` then continues it as any run.

    `checkpoint` is a folder runs/NAME/checkpoints/step_XXXXXXXX. Where the branch exists already nothing is changed.
    """
    config = plan_branch(checkpoint, cooldown, run_name, runs)
    checkpoint = Path(checkpoint).resolve()
    source, target = run_of(checkpoint), RunFolder.of(config)
    if target.path.exists():
        return config
    with whole_folder(target.path) as folder:
        partial = RunFolder(folder)
        shutil.copytree(checkpoint, partial.checkpoints / checkpoint.name, copy_function=link_or_copy)
        if source.metrics.exists():
            shutil.copy(source.metrics, partial.metrics)
            MetricsFile(partial.metrics).rewind(config.steps - cooldown)
        for name in TOKENIZER_FILES:
            if (source.path / name).is_file():
                shutil.copy(source.path / name, folder / name)
        stored = source.stored()
        assert stored is not None
        partial.begin(config, facts=stored[1])
    return config


def plan_branch(
    checkpoint: Path | str, cooldown: int, run_name: str | None = None, runs: str | None = None
) -> TrainConfig:
    """Return the settings of a branch, without making it."""
    checkpoint = Path(checkpoint).resolve()
    source = run_of(checkpoint)
    stored = source.stored()
    if stored is None:
        raise ValueError(f"{checkpoint} is not a checkpoint in the folder of a run")
    step = read_checkpoint(checkpoint).step
    name = run_name or f"{source.path.name}-{step}-{cooldown}"
    return branch_config(stored[0], step, cooldown, name, runs or str(source.path.parent))


def run_of(checkpoint: Path) -> RunFolder:
    return RunFolder(checkpoint.parent.parent)


def branch_config(old: TrainConfig, step: int, cooldown: int, run_name: str, runs: str) -> TrainConfig:
    """Return the settings of a branch: the rates of the old run up to `step`, then a straight line to zero."""
    if cooldown < 1:
        raise ValueError(f"a branch needs a cooldown of at least 1 step, got {cooldown}")
    if step < old.schedule.warmup:
        raise ValueError(f"step {step} is still in the warm-up of {old.schedule.warmup} steps: branch from a later one")
    if old.schedule.cooldown and step > old.steps - old.schedule.cooldown:
        raise ValueError(
            f"step {step} is already in the cooldown, which began at {old.steps - old.schedule.cooldown}: "
            "branch from an earlier one"
        )
    return replace(
        old,
        run_name=run_name,
        runs=runs,
        steps=step + cooldown,
        schedule=replace(old.schedule, cooldown=cooldown, decay_steps=old.schedule.decay_steps or old.steps),
    )


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link if the file system has them, else a copy: checkpoints are never changed in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
