"""The losses of image-text training, whole and in parts, against plain float64 loops."""

import math
from types import SimpleNamespace

import pytest
import torch
from routers import moe_of
from torch import Tensor
from two_towers import IMAGE, shape, tokenizer

from softmoe.models import Embeddings, TwoTower
from softmoe.moe.record import Recording
from softmoe.train.config import ObjectiveSection
from softmoe.train.distributed import Team
from softmoe.train.objectives import Contrastive, contrastive_loss, join_parts
from softmoe.train.step import forward_backward

KINDS = ("sigmoid", "softmax")


def random_embeddings(bias: bool = True) -> Embeddings:
    def unit() -> Tensor:
        return torch.nn.functional.normalize(torch.randn(5, 4, dtype=torch.float64)).requires_grad_()

    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    return Embeddings(
        unit(), unit(), scale, torch.tensor(-3.0, dtype=torch.float64, requires_grad=True) if bias else None
    )


def plain_loss(e: Embeddings, kind: str) -> Tensor:
    """By loops over pairs, written from the formula."""
    assert e.image is not None
    assert e.text is not None
    B = len(e.image)
    logit = [[(e.image[i] * e.text[j]).sum() * e.scale for j in range(B)] for i in range(B)]
    if kind == "sigmoid":
        bias = 0.0 if e.bias is None else e.bias
        terms = [
            (1 + torch.exp(-(1.0 if i == j else -1.0) * (logit[i][j] + bias))).log() for i in range(B) for j in range(B)
        ]
        return torch.stack(terms).sum() / B
    rows = [torch.stack(logit[i]).exp().sum().log() - logit[i][i] for i in range(B)]
    columns = [torch.stack([logit[i][j] for i in range(B)]).exp().sum().log() - logit[j][j] for j in range(B)]
    return 0.5 * (torch.stack(rows).mean() + torch.stack(columns).mean())


def gradients(e: Embeddings, loss: Tensor) -> list[Tensor]:
    inputs = [tensor for tensor in e if tensor is not None]
    return [g for g in torch.autograd.grad(loss, inputs, allow_unused=True) if g is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_the_plain_ones(kind, bias):
    """Value and gradients in both sides, scale and bias, to 1e-12."""
    e = random_embeddings(bias)
    loss, expected = contrastive_loss(e, kind), plain_loss(e, kind)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for found, wanted in zip(gradients(e, loss), gradients(e, expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_losses_of_known_answers():
    """Nothing known: softmax gives ln B, sigmoid B ln 2 without scale and bias. Extreme logits stay finite."""
    e = random_embeddings()._replace(scale=torch.tensor(0.0), bias=torch.tensor(0.0))
    assert float(contrastive_loss(e, "softmax").detach()) == pytest.approx(math.log(5))
    assert float(contrastive_loss(e, "sigmoid").detach()) == pytest.approx(5 * math.log(2))
    for kind in KINDS:
        assert contrastive_loss(e._replace(scale=torch.tensor(1e4)), kind).isfinite()


def make_run(kind: str, model: TwoTower, accumulate: int):
    """What forward_backward looks at."""
    return SimpleNamespace(
        config=SimpleNamespace(accumulate=accumulate, objective=ObjectiveSection(kind, auxiliary_weight=2.0)),
        recording=Recording(model),
        objective=Contrastive(ObjectiveSection(kind), tokenizer(), 16),
        forward=model,
        autocast=None,
        in_backward=None,
        device=torch.device("cpu"),
        team=Team(),
        model=model,
    )


def make_batch(size: int = 8):
    from softmoe.data import Batch

    generator = torch.Generator().manual_seed(3)
    words = ["a red star", "a blue ring on sand", "a heart", "two disks"]
    return Batch(
        torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64),
        torch.full((size,), -1),
        torch.arange(size),
        tuple((f"{words[k % 4]} {k}", "another") for k in range(size)),
        draws=torch.arange(size),
    )


def towers(router: str = "soft", **changes) -> TwoTower:
    from dataclasses import replace

    torch.manual_seed(1)
    moe = moe_of(router, num_experts=2, noise_std=0.0, gshard_weight=0.1)
    image = replace(IMAGE, moe=moe, dropout=changes.pop("dropout", 0.0))
    model = TwoTower(shape(image=image, scale_init=5.0, **changes)).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def backward(run, model: TwoTower) -> tuple[float, float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss, auxiliary, _ = forward_backward(run, make_batch())
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss), float(auxiliary), grads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("router", ["soft", "tokens_choice"])
def test_parts_give_the_gradient_of_the_whole(kind, router):
    """A batch in 2 and 4 parts: loss and every gradient, those of scale, bias, routers and balance losses too."""
    model = towers(router, bias_init=-2.0 if kind == "sigmoid" else None, embed_dim=8)
    loss, auxiliary, whole = backward(make_run(kind, model, 1), model)
    assert (auxiliary > 0) == (router == "tokens_choice")
    assert "log_scale" in whole
    for parts in (2, 4):
        again, balance, found = backward(make_run(kind, model, parts), model)
        assert again == pytest.approx(loss, rel=1e-12)
        assert balance == pytest.approx(auxiliary, rel=1e-12)
        assert found.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_balance_losses_are_added():
    """Of a sparse image tower: the loss is that of the pairs and the weighted balance (the paper's code forgets it)."""
    model = towers("tokens_choice")
    run = make_run("sigmoid", model, 1)
    loss, auxiliary, _ = backward(run, model)
    plain, _ = run.objective(model, make_batch())
    assert loss == pytest.approx(float(plain.detach()) + auxiliary, rel=1e-12)


def test_parts_repeat_their_random_numbers():
    """With dropout the second pass of each part must draw what the first drew: equal to one graph of all parts."""
    model = towers(dropout=0.5)
    run = make_run("sigmoid", model, 2)
    loss, _, found = backward(run, model)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    from softmoe.train.data import split_batch

    parts = [run.objective.embed(model, part) for part in split_batch(make_batch(), 2)]
    image, text = (torch.cat([getattr(part, side) for part in parts]) for side in ("image", "text"))
    expected = contrastive_loss(parts[0]._replace(image=image, text=text), "sigmoid")
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_joined_embeddings_are_numbers():
    """The graphs of the parts are let go."""
    e = random_embeddings()
    whole = join_parts([e, e])
    assert whole.image is not None
    assert whole.image.shape == (10, 4)
    assert all(tensor is None or tensor.is_leaf for tensor in whole)


def test_the_drawn_caption_is_used():
    """draws choose among the captions; without them it is the first."""
    batch = make_batch()
    objective = Contrastive(ObjectiveSection("sigmoid"), tokenizer(), 16)
    chosen = [captions[k % 2] for k, captions in enumerate(batch.captions)]
    assert torch.equal(objective.tokens(batch), tokenizer().encode(chosen, 16))
    from dataclasses import replace

    first = objective.tokens(replace(batch, draws=None))
    assert torch.equal(first, tokenizer().encode([captions[0] for captions in batch.captions], 16))
