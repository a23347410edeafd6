"""A run that takes a fraction of a second: a two-block model on four-pixel patches of the built-in shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from softmoe.data import TransformConfig
from softmoe.train import (
    CheckpointSection,
    DataSection,
    EvaluationSection,
    LogSection,
    ModelSection,
    ScheduleSection,
    TrainConfig,
)

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture(autouse=True)
def _default_dtype():
    """Tests that compute in float64 leave the others alone."""
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """make_config(steps=6, **{"model.router": "tokens_choice"}) -> TrainConfig in tmp_path/runs/run"""
    return config_maker(tmp_path)


def config_maker(folder: Path) -> MakeConfig:
    """As the fixture above, for fixtures that several tests share."""

    def make(**changes: Any) -> TrainConfig:
        config = TrainConfig(
            runs=str(folder / "runs"),
            steps=6,
            model=ModelSection(name="soft_ti4_4e", width=16, depth=2, heads=2, mlp_dim=16),
            data=DataSection(
                train="shapes?size=16",
                batch_size=4,
                eval_batch_size=8,
                workers=0,
                transform=TransformConfig(image_size=16, crop="resize", flip=False),
            ),
            schedule=ScheduleSection(kind="constant", peak=1e-2, warmup=0),
            evaluation=EvaluationSection(every=None, examples=8),
            checkpoint=CheckpointSection(every=2),
            log=LogSection(every=2, quiet=True),
        )
        values = config.to_dict()
        for key, value in changes.items():
            section, _, name = key.rpartition(".")
            place = values
            for part in filter(None, section.split(".")):
                place = place[part]
            assert name in place or section == "model", key  # options of a router are beside the settings of the model
            place[name] = value
        return TrainConfig.from_dict(values)

    return make
