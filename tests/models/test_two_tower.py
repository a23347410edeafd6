"""Two towers: one space, what is learned beside them, saved and loaded."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from two_towers import IMAGE, save, shape, tokenizer, two_towers

import softmoe
from softmoe.models import TwoTower, VisionTransformer
from softmoe.models.two_tower import unit
from softmoe.storage import TokenizerFile, load_two_tower, open_saved

IMAGES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
TOKENS = torch.tensor([[5, 6, 1], [7, 1, 1], [1, 1, 1]])


def test_unit_vectors_and_logits():
    """Both of length 1 in the image tower's width; scale and bias start as told."""
    model = two_towers()
    found = model(IMAGES, TOKENS)
    for vectors in (found.image, found.text):
        assert vectors.shape == (3, 16)
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    assert found.scale.item() == pytest.approx(10.0)
    assert found.bias.item() == -10.0
    assert model.log_scale.item() == pytest.approx(math.log(10))
    assert two_towers(bias_init=None)(IMAGES, TOKENS).bias is None


def test_one_tower_at_a_time():
    """None leaves the other tower alone; its vectors are the same."""
    model = two_towers()
    both = model(IMAGES, TOKENS)
    images, texts = model(IMAGES, None), model(None, TOKENS)
    assert images.text is None
    assert texts.image is None
    torch.testing.assert_close(images.image, both.image)
    torch.testing.assert_close(texts.text, both.text)


@pytest.mark.parametrize("embed_dim", [None, 24])
def test_features_stand_for_images(embed_dim):
    """The features of the image tower give the vectors that the images give, projected or not."""
    model = two_towers(embed_dim=embed_dim)
    found = model.embed_images(model.image(IMAGES))
    torch.testing.assert_close(found, model.embed_images(IMAGES))
    assert found.shape == (3, embed_dim or 16)


@pytest.mark.parametrize("changes", [{"head_blocks": (0, 1)}, {"representation_size": 8}])
@pytest.mark.parametrize("embed_dim", [None, 24])
def test_the_width_of_the_image_towers_features(embed_dim, changes):
    """Texts are as wide as images, also where the image tower gives several blocks or a narrower vector."""
    image = replace(IMAGE, **changes)
    found = two_towers(image=image, embed_dim=embed_dim)(IMAGES, TOKENS)
    assert found.image.shape == found.text.shape == (3, embed_dim or image.head_width)


def test_unit_is_the_references():
    """z / (norm + 1e-8), and a zero vector stays zero with a finite gradient."""
    z = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(unit(z), z / (z.square().sum(1, keepdim=True).sqrt() + 1e-8))
    zero = torch.zeros(1, 5, requires_grad=True)
    unit(zero).sum().backward()
    assert zero.grad.isfinite().all()
    assert unit(torch.randn(2, 5).bfloat16()).dtype == torch.float32


def test_a_locked_tower_keeps_still():
    """No gradient, and evaluation mode even while the rest trains."""
    model = two_towers()
    model.lock_image_tower()
    model.train()
    assert model.text.training
    assert not model.image.training
    model(IMAGES, TOKENS).image.sum().requires_grad_().backward()
    assert all(p.grad is None for p in model.image.parameters())


def test_a_head_is_refused():
    """Towers end in vectors."""
    from dataclasses import replace

    with pytest.raises(ValueError, match="an image tower has no head, but num_classes is 5"):
        TwoTower(shape(image=replace(shape().image, num_classes=5)))


def test_saved_and_loaded(tmp_path):
    """Bit for bit, with the tokenizer; as a model for images it is the image tower."""
    folder = save(tmp_path / "model", embed_dim=8)
    saved = open_saved(folder)
    model, expected = load_two_tower(saved), two_towers(embed_dim=8)
    assert saved.tokenizer.data == tokenizer().data
    assert saved.towers == model.config == shape(embed_dim=8)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    tower = softmoe.from_pretrained(folder)
    assert isinstance(tower, VisionTransformer)
    assert torch.equal(tower(IMAGES), expected.image(IMAGES))
    card = (folder / "README.md").read_text()
    assert "softmoe search model" in card
    assert "400 tokens" in card or "tokens |" in card


@pytest.mark.parametrize(("embed_dim", "width"), [(None, 8), (24, 24)])
def test_the_card_tells_the_true_width(tmp_path, embed_dim, width):
    """That of the vectors, which a tanh layer in the image tower makes narrower than its tokens."""
    folder = save(tmp_path / "model", image=replace(IMAGE, representation_size=8), embed_dim=embed_dim)
    assert f"vectors of {width} numbers" in (folder / "README.md").read_text()


def test_methods_of_the_hub(tmp_path, monkeypatch):
    """They save both towers with a tokenizer, load both in evaluation mode, and put them on the Hub whole."""
    model, sent = two_towers(embed_dim=8), []
    with pytest.raises(ValueError, match=r"give tokenizer= for two towers \(softmoe.data.Tokenizer.open"):
        model.save_pretrained(tmp_path / "model")
    model.train().save_pretrained(tmp_path / "model", tokenizer=tokenizer())
    again = TwoTower.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert (again.training, again.log_scale.dtype) == (False, torch.float64)
    assert again.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.double()), name
    model.image.save_pretrained(tmp_path / "image")
    with pytest.raises(ValueError, match="is a model for images alone"):
        TwoTower.from_pretrained(tmp_path / "image")

    def upload(folder: Path, name: str, **_) -> None:
        sent.append((name, sorted(path.name for path in folder.iterdir())))

    monkeypatch.setattr("softmoe.storage.hub.upload", upload)
    model.push_to_hub("me/towers", tokenizer=tokenizer())
    assert sent == [("me/towers", ["README.md", "config.json", "model.safetensors", "tokenizer.json"])]


def test_a_model_for_images_has_no_texts(tmp_path):
    """Said in one sentence, with what to do."""
    softmoe.save_pretrained(two_towers().image, tmp_path / "model")
    with pytest.raises(ValueError, match="is a model for images alone; softmoe train lit_small --image"):
        load_two_tower(open_saved(tmp_path / "model"))


def test_the_tokenizer_belongs_to_the_model(tmp_path):
    """Two towers without one, and an image model with one, are not saved; a changed or lost file is refused."""
    file = TokenizerFile("tokenizer.json", tokenizer().data)
    with pytest.raises(ValueError, match="two towers are saved with their tokenizer"):
        softmoe.save_pretrained(two_towers(), tmp_path / "a")
    with pytest.raises(ValueError, match="a model for images alone has none"):
        softmoe.save_pretrained(two_towers().image, tmp_path / "a", tokenizer=file)
    folder = save(tmp_path / "model")
    data = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(data.replace(b"a", b"b", 1))
    with pytest.raises(ValueError, match="is not the one the model was saved with"):
        open_saved(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"the tokenizer tokenizer.json cannot be read"):
        open_saved(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(kind="vit"), "unknown key 'tokenizer'"),
        (lambda v: v.update(kind="three_tower"), "expected 'vit' or 'two_tower'"),
        (lambda v: v["architecture"]["text"].update(wdith=3), "unknown key 'architecture.text.wdith'"),
        (lambda v: v["tokenizer"].update(file="../tokenizer.json"), "is not the name of a tokenizer"),
        (lambda v: v["architecture"].update(embed_dim=4), "embed_dim"),
    ],
)
def test_damaged_settings(change, words, tmp_path):
    """Each is named."""
    folder = save(tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=words):
        load_two_tower(open_saved(folder))
