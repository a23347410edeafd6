"""Models that turn images and texts into vectors or logits."""

from softmoe.models.config import MoEConfig, TextConfig, TwoTowerConfig, ViTConfig
from softmoe.models.registry import create_model, list_models, model_config
from softmoe.models.two_tower import Embeddings, TextTransformer, TwoTower
from softmoe.models.vit import VisionTransformer

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
