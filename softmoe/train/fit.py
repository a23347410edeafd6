"""A recipe made to fit a run: what was not set by hand follows the number of steps and the size of the data."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from softmoe.data import open_source
from softmoe.storage.files import flatten
from softmoe.train.config import ModelSection, TrainConfig

ROWS, EVALUATIONS = 10, 4  # of a run that is shorter than its recipe, at least


def steps_of(epochs: float, config: TrainConfig) -> int:
    """Return how many steps see the training images `epochs` times."""
    if not epochs > 0:
        raise ValueError(f"the number of epochs must be above 0, got {epochs}")
    images = len(open_source(config.data.train, config.data.train_split))
    return max(1, round(epochs * images / config.data.batch_size))


def fit(config: TrainConfig, recipe: TrainConfig, given: Collection[str] = ()) -> tuple[TrainConfig, str]:
    """Return the settings with all that is not `given` (keys such as schedule.warmup) scaled to them, and a sentence.

    Of a run shorter than its recipe warm-up and cooldown keep their share, there are at least ten lines of metrics, and
    evaluations and checkpoints at each quarter. Captions are told apart within a batch, so a batch of pairs is at most
    half of the set. The sentence is empty if nothing was changed.
    """
    wanted = {}
    if config.text.size is not None and "data.batch_size" not in given:
        pairs = len(open_source(config.data.train, config.data.train_split))
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
    """Return what a run has that is this share of its recipe, by key."""
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
    """Return the settings with other values, by whole keys such as data.transform.flip or model.top_k."""
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
