"""`softmoe plan`: memory, traffic and time of training on many devices, before there are any."""

import json
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from softmoe.cli.parse import parse


@dataclass(frozen=True)
class Arguments:
    """Find the layouts of a model that fit on so many devices, and the fastest of them."""

    model: str
    """A model, like soft_s16_128e or soft_h14_256e."""
    _: KW_ONLY
    devices: int = 8
    memory: str | None = None
    """Memory of one device, like 40GB; None is that of the device."""
    batch: int = 4096
    """Images per step, all devices together."""
    device: Literal["a100-40", "a100-80", "h100"] = "a100-40"
    interconnect: float | None = None
    """GB/s of one device to other nodes; None is that of the device."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    classes: int = 1000
    image_size: int = 224
    json: bool = False
    """Print exact numbers as JSON."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "plan")
    size = None if arguments.memory is None else parse_bytes(arguments.memory)  # a typo shall not wait for torch

    from softmoe.budget.plan import DEVICES, Settings, most_experts, plans
    from softmoe.budget.report import plan_report, plan_values
    from softmoe.models import model_config

    hardware = DEVICES[arguments.device]
    hardware = replace(hardware, memory=size or hardware.memory)
    if arguments.interconnect is not None:
        hardware = replace(hardware, between=arguments.interconnect * 1e9)
    config = model_config(arguments.model, num_classes=arguments.classes or None, image_size=arguments.image_size)
    item = 2 if arguments.precision == "bfloat16" else 4
    settings = Settings(arguments.batch, activation_bytes=item, optimizer=arguments.optimizer)
    candidates = plans(config, arguments.devices, settings)
    most = most_experts(config, arguments.devices, settings, hardware)
    if arguments.json:
        print(json.dumps(plan_values(candidates, hardware, most), indent=2))
    else:
        print(plan_report(arguments.model, candidates, hardware, most))
    return 0


def parse_bytes(text: str) -> float:
    """40GB, 40 GiB, 512MB -> bytes."""
    units = {"GB": 1e9, "GIB": 2**30, "MB": 1e6, "MIB": 2**20, "TB": 1e12}
    digits = text.rstrip("GMTIBgmtib ")
    unit = text[len(digits) :].strip().upper()
    try:
        value = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"--memory must be a size like 40GB or 80GiB, got {text!r}") from None
    if value <= 0:
        raise ValueError(f"--memory must be above 0, got {text!r}")
    return value
