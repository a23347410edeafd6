"""What several processes cannot share is refused before anything is built."""

from dataclasses import replace

import pytest

from softmoe.models import ViTConfig
from softmoe.train import OptimSection, TrainConfig
from softmoe.train.distributed import Team

CONFIG = TrainConfig(optim=OptimSection(clip_norm=None))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            replace(CONFIG, optim=OptimSection(clip_norm=None, in_backward=True)),
            r"optim\.in_backward is for one process",
        ),
        (replace(CONFIG, accumulate=3), "accumulate must divide the .* images of a process, got 3"),
    ],
)
def test_refused(config, sentence):
    """One sentence each, on two processes; one process alone takes them all."""
    with pytest.raises(ValueError, match=sentence):
        Team(world=2).check(config, ViTConfig())
    Team().check(config, ViTConfig())
