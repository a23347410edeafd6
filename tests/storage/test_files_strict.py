import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

import pytest

from softmoe.models import MoEConfig, ViTConfig, model_config
from softmoe.models.moe_config import router_options
from softmoe.moe import RouterConfig
from softmoe.storage.settings import flatten, from_dict
from softmoe.train import ModelSection, TrainConfig


@dataclass(frozen=True)
class Inner:
    size: int | tuple[int, int] = 4
    kind: Literal["a", "b"] = "a"
    rules: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Outer:
    rate: float = 0.1
    name: str | None = None
    flag: bool = False
    inner: Inner = field(default_factory=Inner)


def test_round_trip_through_json():
    """A configuration written as JSON comes back equal, tuples as tuples."""
    outer = Outer(0.5, "x", True, Inner((2, 3), "b", (("w", 1.0),)))
    assert from_dict(Outer, json.loads(json.dumps(asdict(outer)))) == outer
    config = TrainConfig(model=ModelSection(blocks=(1, 2)), ema=0.99)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"raet": 1.0}, r"unknown key 'raet', did you mean 'rate'\?"),
        ({"inner": {"sise": 1}}, r"unknown key 'inner.sise', did you mean 'inner.size'\?"),
        ({"rate": "fast"}, "rate must be float, got 'fast'"),
        ({"flag": 1}, "flag must be bool, got 1"),
        ({"rate": True}, "rate must be float, got True"),
        ({"name": 3}, "name must be str or None, got 3"),
        ({"inner": {"kind": "c"}}, "inner.kind must be one of a, b, got 'c'"),
        ({"inner": {"size": [1, 2, 3]}}, r"inner.size must be int or tuple\[int, int\], got \[1, 2, 3\]"),
        ({"inner": 3}, "inner must be a table of settings, got 3"),
    ],
)
def test_wrong_values_are_named(values: dict, message: str):
    """The sentence has the key, the type and what came."""
    with pytest.raises(ValueError, match=message):
        from_dict(Outer, values)


def test_missing_keys_take_their_defaults():
    """An older file without a new key still loads; whole numbers may stand for floats."""
    assert from_dict(Outer, {"rate": 2}) == Outer(rate=2.0)


def test_flatten():
    """Nested tables become dotted keys."""
    assert flatten({"a": 1, "b": {"c": 2, "d": {"e": 3}}}) == {"a": 1, "b.c": 2, "b.d.e": 3}


def test_model_section_has_every_model_setting():
    """No field of ViTConfig or MoEConfig is missing; `options` has those of the routers, by their own names."""
    ours = {f.name for f in fields(ModelSection)}
    theirs = {f.name for f in (*fields(ViTConfig), *fields(MoEConfig), *fields(RouterConfig))} - {"moe"}
    assert theirs <= ours
    assert not ours & (router_options().keys() - {"num_experts"})


def test_model_section_resolves():
    """Overrides go to the transformer and to the experts; the data give classes and size unless said otherwise."""
    section = ModelSection("soft_s16_128e", width=96, heads=3, num_experts=8, options={"scale_init": 2.0})
    base = model_config("soft_s16_128e", num_classes=10, image_size=64)
    assert base.moe is not None
    expected = replace(base, width=96, heads=3, moe=base.moe.change(num_experts=8, scale_init=2.0))
    assert section.resolve(10, 64) == expected
    assert ModelSection("vit_s16", num_classes=7, image_size=32).resolve(10, 64).num_classes == 7


def test_the_router_can_be_changed_or_taken_out():
    """`router` makes the twins of a recipe: other routing, or dense, where settings of experts do not matter."""
    section = ModelSection("soft_s16_128e", num_experts=8)
    sparse = replace(section, router="tokens_choice").resolve(10, 64)
    assert sparse.moe == MoEConfig.of("tokens_choice", num_experts=8)
    assert replace(section, router="dense").resolve(10, 64) == model_config("vit_s16", num_classes=10, image_size=64)
    assert ModelSection("vit_s16", router="soft", num_experts=4).resolve(10, 64).moe == MoEConfig.of("soft", 4)


def test_expert_settings_of_a_dense_name_are_an_error():
    """They would silently do nothing."""
    with pytest.raises(ValueError, match=r"'vit_s16' has no experts, but num_experts is set"):
        ModelSection("vit_s16", num_experts=4).resolve(10, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"accumulate": 3}, "64 is not a multiple of 3"),
        ({"steps": 10}, r"must fit in the run: 10000 \+ 0 steps of 10"),
        ({"ema": 1.0}, r"ema must be in \[0, 1\)"),
        ({"run_name": "a/b"}, "plain folder name"),
    ],
)
def test_settings_that_cannot_work(changes: dict, message: str):
    """Refused before anything is opened."""
    with pytest.raises(ValueError, match=message):
        replace(TrainConfig(), **changes).check()
