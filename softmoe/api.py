"""Training from scripts and notebooks in one call, as the command line does it.

    softmoe.train("small_data", "photos", epochs=5, lr=1e-3)         the room softmoe.train can be called
    softmoe.finetune("runs/small_data", "other_photos", steps=300)

The other commands are functions as well: softmoe.evaluate(MODEL, DATA), softmoe.predict(MODEL, IMAGES),
softmoe.fewshot(MODEL, DATA). Settings are those of the command line, by their whole key ({"schedule.peak": 1e-3}) or by
its last part.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from softmoe import recipes
from softmoe.cli.habits import nearest, whole_key
from softmoe.cli.train import train_as_asked
from softmoe.machine import is_first_process
from softmoe.models.moe_config import router_options
from softmoe.storage.settings import flatten
from softmoe.train import Result, TrainConfig
from softmoe.train.fit import new_run, set_keys
from softmoe.transfer import transfer_config, write_finished


def train(recipe: str, data: str | Path | None = None, **settings: Any) -> Result:
    """Train from a recipe (its name, or a .py file) on images, and save the model in the run's folder.

    `softmoe.from_pretrained(result.folder.path)` is the model: that of the best evaluation, whose numbers are
    `result.numbers`; those of a stopped run are of its last evaluation. A call with the same settings continues it.
    """
    return _run(recipes.load(recipe), data, settings)


def finetune(
    model: str | Path, data: str | Path, *, image_size: int | tuple[int, int] | None = None, **settings: Any
) -> Result:
    """Train a saved model on other classes, at any image size."""
    return _run(transfer_config(recipes.load("finetune"), model, image_size=image_size), data, settings)


def _run(recipe: TrainConfig, data: str | Path | None, settings: dict[str, Any]) -> Result:
    keys = [*flatten(recipe.to_dict()), *(f"model.{name}" for name in router_options())]
    epochs = settings.pop("epochs", None)
    given = {whole_key(name, keys): value for name, value in settings.items()}
    if data is not None:
        given["data.train"] = str(data)
    for key in given:
        if key not in keys:
            near = nearest(key, keys)
            more = f", did you mean {near!r}?" if near else "; `softmoe train RECIPE --help` lists them"
            raise ValueError(f"there is no setting {key!r}{more}")
    config = TrainConfig.from_dict(set_keys(recipe, given).to_dict())  # which looks at the types too
    config, said = new_run(config, recipe, given, epochs)
    if not config.log.quiet and is_first_process():
        print(*said, sep="\n", end="\n" if said else "")
    result = train_as_asked(config)
    if result.rank == 0 and result.signal is None:
        _, numbers = write_finished(result)
        result = replace(result, numbers=numbers)
    return result
