"""Images -> vector or logits."""

from softmoe.models.config import MoEConfig, ViTConfig
from softmoe.models.registry import create_model, list_models, model_config
from softmoe.models.vit import VisionTransformer

__all__ = ["MoEConfig", "ViTConfig", "VisionTransformer", "create_model", "list_models", "model_config"]
