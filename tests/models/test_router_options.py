"""An option of a router is declared once, in its config; names, recipes, command line and files find it there."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from softmoe.cli import main
from softmoe.cli.parse import parse_run
from softmoe.models import MoEConfig, ViTConfig, create_model, model_config
from softmoe.moe import Router, SoftConfig, SoftRouter
from softmoe.moe.config import ROUTERS
from softmoe.train import ModelSection, TrainConfig

RECIPE = """
from softmoe.train import ModelSection, TrainConfig

def recipe() -> TrainConfig:
    return TrainConfig(model=ModelSection("toy_ti16_4e", options={"gain": 3.0}))
"""
FORMER = {  # as config.json described all MoE layers before each router had a config of its own
    "router": "soft", "num_experts": 4, "slots_per_expert": 2, "blocks": [1, 3], "expert_dropout": None,
    "identical_init": False, "normalize": True, "scale_init": 6.0, "noise_std": None, "top_k": 1,
    "capacity_factor": 1.0, "batch_priority": True, "group_size": None, "importance_weight": 0.005,
    "load_weight": 0.005, "gshard_weight": 0.0,
}  # fmt: skip


@pytest.fixture
def toy() -> Iterator[None]:
    """A router with an option of its own. To define its config is all that is done."""

    @dataclass(frozen=True)
    class ToyConfig(SoftConfig, name="toy"):
        gain: float = 1.0
        """How loud the toy is."""

        def build(self, dim: int) -> Router:
            return ToyRouter(dim, **vars(self))

    class ToyRouter(SoftRouter):
        def __init__(self, dim: int, num_experts: int, slots_per_expert: int = 1, *, gain: float = 1.0, **soft):
            super().__init__(dim, num_experts, slots_per_expert, **soft)
            self.gain = gain

    yield
    del ROUTERS["toy"]


def gain_of(config: TrainConfig) -> float:
    """What the option is in the run's model."""
    moe = config.model.resolve(10, 224).moe
    assert moe is not None
    return vars(moe.router)["gain"]


@pytest.mark.usefixtures("toy")
def test_a_new_option_is_reached_from_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """From names, from a recipe, from the command line with its help, and from stored settings."""
    model = create_model("toy_ti16_4e", image_size=32, depth=2, gain=2.0, scale_init=6.0)
    router = model.encoder.blocks[1].mlp.router
    assert (router.gain, router.scale_init) == (2.0, 6.0)
    assert ViTConfig.from_dict(json.loads(json.dumps(model.config.to_dict()))) == model.config

    recipe = tmp_path / "mine.py"
    recipe.write_text(RECIPE)
    config = TrainConfig(model=ModelSection("toy_ti16_4e", options={"gain": 3.0}))
    assert gain_of(config) == 3.0
    assert gain_of(TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))) == 3.0
    assert gain_of(parse_run(config, ["--model.gain", "4"], "softmoe train")[0]) == 4.0

    overrides = ["--model.gain", "5", "--data.train", "shapes?size=32&length=64", "--data.batch-size", "8"]
    assert main(["train", str(recipe), "--dry-run", *overrides]) == 0
    assert "moe.gain = 5.0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", str(recipe), "--help"])
    assert "How loud the toy is. (default: 3.0)" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_an_option_of_another_router_is_an_error():
    """It names the option, the router and what the router has, wherever the option comes from."""
    message = r"the router 'soft' has no option 'top_k'; it has num_experts, slots_per_expert, normalize, noise_std"
    with pytest.raises(ValueError, match=message):
        create_model("soft_ti16_4e", top_k=4)
    with pytest.raises(ValueError, match=message):
        ModelSection("soft_ti16_4e", options={"top_k": 4}).resolve(10, 32)
    with pytest.raises(ValueError, match=message):
        parse_run(TrainConfig(), ["--model.top-k", "4"], "softmoe train")[0].model.resolve(10, 32)
    with pytest.raises(ValueError, match="the router 'tokens_choice' has no option 'slots_per_expert'"):
        create_model("tokens_choice_ti16_4e2p")
    with pytest.raises(ValueError, match=r"model\.top_k must be int, got 'two'"):
        TrainConfig.from_dict({"model": {"router": "tokens_choice", "top_k": "two"}})


def test_another_router_leaves_the_options_it_does_not_have():
    """A recipe of one router gives its twin of another: what both have stays, what is asked for is set."""
    recipe = TrainConfig(model=ModelSection("soft_ti16_4e2p", options={"scale_init": 6.0, "noise_std": 0.1}))
    for change in (["--model.router", "tokens_choice"], ["--model.name", "tokens_choice_ti16_4e"]):
        section = parse_run(recipe, [*change, "--model.top-k", "2"], "softmoe train")[0].model
        assert section.options == {"noise_std": 0.1, "top_k": 2}
        expected = MoEConfig.of("tokens_choice", 4, noise_std=0.1, top_k=2)
        assert section.resolve(10, 32).moe == expected
    assert parse_run(recipe, ["--model.router", "dense"], "softmoe train")[0].model.resolve(10, 32).moe is None
    assert parse_run(recipe, ["--model.scale-init", "None"], "x")[0].model.options == {"noise_std": 0.1}


def test_models_and_runs_stored_before_are_read():
    """One list of options for all routers, with null for the router's own noise, is cut to what the router has."""
    config = ViTConfig.from_dict(model_config("soft_ti16_4e").to_dict() | {"moe": FORMER})
    expected = MoEConfig.of("soft", 4, slots_per_expert=2, blocks=(1, 3), scale_init=6.0)
    assert config.moe == expected
    sparse = MoEConfig.from_dict(FORMER | {"router": "tokens_choice", "top_k": 2})
    assert sparse == MoEConfig.of("tokens_choice", 4, top_k=2, blocks=(1, 3))
    with pytest.raises(ValueError, match="the router 'soft' has no option 'top_k'"):
        MoEConfig.from_dict(expected.to_dict() | {"top_k": 1})  # not the former list: strict
    unset = dict.fromkeys([name for name in FORMER if name != "router"]) | {"name": "soft_ti16_4e", "scale_init": 6.0}
    assert TrainConfig.from_dict({"model": unset}).model == ModelSection("soft_ti16_4e", options={"scale_init": 6.0})
