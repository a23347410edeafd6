"""Models that turn images and texts into vectors or logits.

Names are loaded when first used: the configs of models do without torch.
"""

from typing import TYPE_CHECKING

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.models.config import TextConfig, TwoTowerConfig, ViTConfig
    from softmoe.models.moe_config import MoEConfig
    from softmoe.models.registry import create_model, list_models, model_config
    from softmoe.models.two_tower import Embeddings, TextTransformer, TwoTower
    from softmoe.models.vit import VisionTransformer

_HOMES = {
    "config": ("MoEConfig", "TextConfig", "TwoTowerConfig", "ViTConfig"),
    "registry": ("create_model", "list_models", "model_config"),
    "two_tower": ("Embeddings", "TextTransformer", "TwoTower"),
    "vit": ("VisionTransformer",),
}

__all__ = [
    "Embeddings",
    "MoEConfig",
    "TextConfig",
    "TextTransformer",
    "TwoTower",
    "TwoTowerConfig",
    "ViTConfig",
    "VisionTransformer",
    "create_model",
    "list_models",
    "model_config",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
