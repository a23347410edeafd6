"""From dataclasses to the command line and back, with tyro: the only file that knows how."""

from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any

import tyro

from softmoe.models.config import router_options
from softmoe.moe.routing import ROUTERS
from softmoe.train import ModelSection, TrainConfig


def parse_run(default: TrainConfig, argv: list[str], prog: str) -> tuple[TrainConfig, bool]:
    """The settings of a run with what the command line changes, and whether it is a dry run.

    The options of all routers stand among the settings of the model (--model.top-k), as the routers' configs declare
    and describe them. With another router the recipe's options that it does not have are left out.
    """
    types = {name: hint for name, hint in router_options().items() if name != "num_experts"}
    leaves = [
        c for c in ROUTERS.values() if not any(c is not other and issubclass(other, c) for other in ROUTERS.values())
    ]
    hidden = ("options", tyro.conf.Suppress[dict[str, Any]], field(default_factory=dict))
    options = [(name, hint | None, None) for name, hint in types.items()]
    section = make_dataclass("Section", [hidden, *options], bases=(ModelSection, *leaves), frozen=True)
    config = make_dataclass("Config", [("model", section)], bases=(TrainConfig,), frozen=True, kw_only=True)
    whole = Annotated[config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    dry = Annotated[bool, tyro.conf.arg(help="Print the settings, the cost and the memory needed, and stop.")]
    arguments = make_dataclass("Arguments", [("config", whole), ("dry_run", dry, False)], frozen=True)

    model = default.model
    start = config(**vars(default) | {"model": section(**vars(model) | {"options": {}} | model.options)})
    found: Any = tyro.cli(
        arguments,
        args=argv,
        prog=prog,
        default=arguments(start),
        description="",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    given = {name: value for name in types if (value := getattr(found.config.model, name)) != model.options.get(name)}
    own = {f.name: getattr(found.config.model, f.name) for f in fields(ModelSection) if f.name != "options"}
    values = {f.name: getattr(found.config, f.name) for f in fields(TrainConfig)}
    values["model"] = model.change(**own, **given)
    return TrainConfig(**values), found.dry_run
