"""Fit the settings of a recipe to the steps, the data and the folder of a new run. This file loads without torch."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from softmoe.data import open_source
from softmoe.storage.settings import flatten
from softmoe.train.config import ModelSection, TrainConfig

ROWS, EVALUATIONS = 10, 4  # the least of each in a run that is shorter than its recipe
MIXING = {"mixup": 0.2, "cutmix": 1.0}
MOST_DECAY = 0.5  # twice as much was worse on 10,000 images


def new_run(
    config: TrainConfig, recipe: TrainConfig, given: Collection[str], epochs: float | None = None
) -> tuple[TrainConfig, list[str]]:
    """Return the settings of a new run, made to fit its length and with a free name, and sentences on what changed.

    `given` are the keys that the user has set. ValueError for settings that cannot work together.
    """
    config, fitted = fit(with_epochs(config, epochs, given), recipe, given)
    config.check()
    mixed = decayed = ""
    if config.text.size is None and (config.data.mix_after, config.optim.decay_epochs) != (None, None):
        images = training_images(config)
        config, mixed = with_mixing(config, images, given)
        config, decayed = with_decay(config, images, given)

    from softmoe.train.folder import free_name  # slow to import: a mistake is told before

    config, placed = free_name(config, recipe, named="run_name" in given)
    return config, [sentence for sentence in (fitted, mixed, decayed, placed) if sentence]


def with_epochs(config: TrainConfig, epochs: float | None, given: Collection[str]) -> TrainConfig:
    """Return the settings with as many steps as show each training image `epochs` times; None leaves them."""
    if epochs is None:
        return config
    if "steps" in given:
        raise ValueError("give --epochs or --steps, not both: each says how long the run is")
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not epochs > 0:
        raise ValueError(f"the number of epochs must be above 0, got {epochs!r}")
    if config.data.batch_size < 1:
        raise ValueError(f"data.batch_size must be at least 1, got {config.data.batch_size}")
    images = training_images(config)
    return replace(config, steps=max(1, round(epochs * images / config.data.batch_size)))


def training_images(config: TrainConfig) -> int:
    return len(open_source(config.data.train, config.data.train_split))


def with_mixing(config: TrainConfig, images: int, given: Collection[str] = ()) -> tuple[TrainConfig, str]:
    """Return the settings with mixed images if the run shows each more than data.mix_after times, and a sentence."""
    limit, changes = config.data.mix_after, {f"data.transform.{name}": share for name, share in MIXING.items()}
    set_already = config.data.transform.mixup or config.data.transform.cutmix or any(key in given for key in changes)
    if limit is None or set_already:
        return config, ""
    epochs = config.steps * config.data.batch_size / max(1, images)
    if epochs <= limit:
        return config, ""
    keys = " ".join(f"--{key} 0" for key in changes)
    return set_keys(config, changes), f"each image is seen {epochs:.0f} times, so images are mixed; without: {keys}"


def with_decay(config: TrainConfig, images: int, given: Collection[str] = ()) -> tuple[TrainConfig, str]:
    """Return the settings with the weight decay that optim.decay_epochs asks for on this data, and a sentence.

    A step at rate r shrinks a matrix by r * decay, so in 1 / (r * decay) steps it falls to a third of itself.
    """
    epochs, peak = config.optim.decay_epochs, config.schedule.peak
    if epochs is None or peak == 0.0 or "optim.kernel_decay" in given:
        return config, ""
    steps = epochs * max(1, images) / config.data.batch_size
    decay = min(MOST_DECAY, float(f"{1 / (peak * steps):.3g}"))
    said = f"weight decay is {decay:g}, by the number of training images; another: --optim.kernel-decay"
    return set_keys(config, {"optim.kernel_decay": decay}), said


def fit(config: TrainConfig, recipe: TrainConfig, given: Collection[str] = ()) -> tuple[TrainConfig, str]:
    """Return the settings scaled to their steps and data, except `given` keys such as schedule.warmup, and a sentence.

    In a run shorter than its recipe warm-up and cooldown keep their share, there are at least ten lines of metrics, and
    evaluations and checkpoints at each quarter. A batch of image-text pairs is at most half of the set. The sentence
    says what was changed, and is empty if nothing was.
    """
    wanted = {}
    if config.text.size is not None and "data.batch_size" not in given:
        pairs = training_images(config)
        if config.data.batch_size > pairs // 2:
            wanted["data.batch_size"] = max(2, 1 << (max(pairs // 2, 2).bit_length() - 1))
    if config.steps < recipe.steps:
        wanted |= shorter(config, config.steps / recipe.steps)
    before = flatten(config.to_dict())
    wanted = {key: value for key, value in wanted.items() if key not in given and value != before[key]}
    if not wanted:
        return config, ""
    told = ", ".join(f"{key} {value} (was {before[key]})" for key, value in wanted.items())
    why = f"a run of {config.steps} steps, the recipe has {recipe.steps}" if "log.every" in wanted else "made to fit"
    return set_keys(config, wanted), f"{why}: {told}"


def shorter(config: TrainConfig, share: float) -> dict[str, int | None]:
    """Return the settings, by key, that follow the length of a run which is this share of its recipe's."""
    s, quarter = config.schedule, -(-config.steps // EVALUATIONS)
    every = config.evaluation.every
    return {
        "schedule.warmup": max(min(1, s.warmup), round(s.warmup * share)),
        "schedule.cooldown": round(s.cooldown * share),
        "evaluation.every": every and min(every, quarter),
        "checkpoint.every": min(config.checkpoint.every, quarter),
        "log.every": min(config.log.every, max(1, config.steps // ROWS)),
    }


def set_keys(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return the settings with other values, given by full keys such as data.transform.flip or model.top_k."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: _with(getattr(config, section), name, value)})
    return config


def _with(part: Any, path: str, value: Any) -> Any:
    if not path:
        return value
    if isinstance(part, ModelSection):
        return part.change(**{path: value})
    name, _, rest = path.partition(".")
    return replace(part, **{name: _with(getattr(part, name), rest, value)})
