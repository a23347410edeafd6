import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.models.classification import class_weights, sigmoid_cross_entropy, softmax_cross_entropy
from softmoe.moe.record import Recording
from softmoe.train.config import ObjectiveSection
from softmoe.train.objectives import make_objective


@dataclass
class Pair:
    images: Tensor
    labels: Tensor


def logits_and_targets() -> tuple[Tensor, Tensor]:
    logits = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.3, 3.0]], dtype=torch.float64)
    return logits, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.7, 0.3]], dtype=torch.float64)


def test_softmax_cross_entropy_is_the_plain_sum():
    """-sum y log softmax(z), by loops."""
    logits, targets = logits_and_targets()
    for z, y, got in zip(logits.tolist(), targets.tolist(), softmax_cross_entropy(logits, targets), strict=True):
        total = math.log(sum(math.exp(a) for a in z))
        assert float(got) == pytest.approx(-sum(b * (a - total) for a, b in zip(z, y, strict=True)))


def test_sigmoid_cross_entropy_is_summed_over_classes():
    """sum over classes of -y log s(z) - (1 - y) log s(-z), by loops."""
    logits, targets = logits_and_targets()

    def log_sigmoid(a: float) -> float:
        return -math.log1p(math.exp(-a))

    for z, y, got in zip(logits.tolist(), targets.tolist(), sigmoid_cross_entropy(logits, targets), strict=True):
        expected = -sum(b * log_sigmoid(a) + (1 - b) * log_sigmoid(-a) for a, b in zip(z, y, strict=True))
        assert float(got) == pytest.approx(expected)


def test_label_smoothing_is_torchs():
    """Class numbers with smoothing give torch's own cross-entropy with the same smoothing."""
    logits, labels = torch.randn(5, 7), torch.tensor([0, 6, 3, 3, 1])
    loss, _ = make_objective(ObjectiveSection(label_smoothing=0.2))(nn.Identity(), Pair(logits, labels))
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, labels, label_smoothing=0.2))


def test_mixed_targets_are_linear():
    """The loss of blended labels is the blend of the losses."""
    logits, labels = torch.randn(4, 5), torch.tensor([0, 4, 2, 1])
    hot = class_weights(labels, 5)
    blended = 0.7 * hot + 0.3 * hot.roll(-1, 0)
    expected = 0.7 * softmax_cross_entropy(logits, hot) + 0.3 * softmax_cross_entropy(logits, hot.roll(-1, 0))
    torch.testing.assert_close(softmax_cross_entropy(logits, blended), expected)


@pytest.mark.parametrize("label", [3, 99, -1])
def test_a_label_outside_the_head_is_one_sentence(label: int):
    """The message has the label and the size of the head."""
    objective = make_objective(ObjectiveSection())
    with pytest.raises(ValueError, match=rf"label {label} is outside the model's head, which has 3 classes"):
        objective(nn.Identity(), Pair(torch.zeros(2, 3), torch.tensor([0, label])))


def test_multi_hot_labels_must_have_the_heads_width():
    """Labels of another number of classes are refused."""
    with pytest.raises(ValueError, match="labels have 4 classes, but the model's head has 3"):
        class_weights(torch.zeros(2, 4), 3)


def test_losses_are_float32_under_autocast():
    """A model that answers in bfloat16 still gets a float32 loss."""
    loss, _ = make_objective(ObjectiveSection())(
        nn.Identity(), Pair(torch.zeros(2, 3).bfloat16(), torch.tensor([0, 1]))
    )
    assert loss.dtype == torch.float32


def sparse_model() -> VisionTransformer:
    torch.manual_seed(0)
    moe = MoEConfig.of("tokens_choice", num_experts=3, blocks=(0, 1), noise_std=0.0)
    config = ViTConfig(image_size=16, patch_size=4, width=8, depth=2, mlp_dim=8, heads=2, num_classes=3, moe=moe)
    return VisionTransformer(config)


def test_tap_sums_the_balance_losses():
    """The auxiliary loss is the sum over layers of what each router returns; outside the context nothing is kept."""
    model, images = sparse_model().train(), torch.randn(2, 3, 16, 16)
    seen = []
    for block in model.encoder.blocks:
        block.mlp.router.register_forward_hook(lambda m, i, routing: seen.append(routing.auxiliary_loss))
    tap = Recording(model)
    model(images)
    assert tap.auxiliary_loss() is None
    seen.clear()
    with tap:
        model(images)
    auxiliary = tap.auxiliary_loss()
    assert auxiliary is not None
    assert len(seen) == 2
    torch.testing.assert_close(auxiliary, seen[0] + seen[1])
    tap.clear()
    assert tap.auxiliary_loss() is None


def test_balance_loss_survives_gradient_checkpointing():
    """Gradients with the inside of the blocks computed twice equal those without, balance losses included."""
    images = torch.randn(2, 3, 16, 16)
    gradients = []
    for again in (False, True):
        model = sparse_model().train()
        model.set_grad_checkpointing(again)
        tap = Recording(model)
        with tap:
            logits = model(images)
        auxiliary = tap.auxiliary_loss()
        assert auxiliary is not None
        (logits.square().sum() + 100.0 * auxiliary).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)
