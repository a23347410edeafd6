"""Small inspections to test pages and figures with."""

import numpy as np
import torch

from softmoe.data import to_tensor
from softmoe.inspection.collect import Inspection, Sample, layer_results, take_weights
from softmoe.models import VisionTransformer, create_model
from softmoe.moe.record import evaluating, routers_by_layer

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=2">\'&amp;'


def tiny_model(router: str = "soft", **changes) -> VisionTransformer:
    options = {"image_size": 16, "width": 16, "depth": 4, "heads": 2, "mlp_dim": 16, "num_classes": 3} | changes
    model = create_model(f"{router}_ti4_6e", **options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.scale"):
                parameter.fill_(9.0)  # so that slots differ
    return model


def pixels(count: int, side: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3)).astype(np.uint8)


def inspection(model: VisionTransformer, name: str, count: int = 3, caption: str = "image") -> Inspection:
    raw = pixels(count)
    images = to_tensor(raw)
    total, layers = layer_results(model, images.split(2))
    with evaluating(model), torch.inference_mode():
        weights = take_weights(model, images)
    samples = [
        Sample(picture, f"{caption} {i}", (4, 4), w, f"taken for {caption}")
        for i, (picture, w) in enumerate(zip(raw, weights, strict=True))
    ]
    return Inspection(name, total, layers, routers_by_layer(model), samples)
