"""MoE layers for tests that go through all routers."""

from typing import Any

from softmoe.models import MoEConfig
from softmoe.models.config import option_names


def moe_of(router: str, num_experts: int, **options: Any) -> MoEConfig:
    """The layers with those of the options that this router has."""
    return MoEConfig.of(router, num_experts, **{k: v for k, v in options.items() if k in option_names(router)})
