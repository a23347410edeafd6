"""Classes by name: prompts, names, ranks against brute force."""

import json

import numpy as np
import pytest
import torch
from two_towers import save

from softmoe.data import evaluation_batches, open_source
from softmoe.evaluate import load_towers, zeroshot
from softmoe.evaluate.towers import TEMPLATES, canonical, check_templates, class_ranks, class_vectors, read_names

DATA = "shapes?size=16&classes=downstream&length=150"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "model", embed_dim=12)


def test_numbers_are_those_of_brute_force(model):
    """Every image against every class, each class the renormalized mean over all templates, by plain loops."""
    templates = ("a photo of a {}", "{} here")
    report = zeroshot(model, DATA, templates=templates)
    towers, source = load_towers(model), open_source(DATA, "val")
    classes = []
    for name in source.classes:
        vectors = [towers.embed_texts([template.replace("{}", name)])[0].double() for template in templates]
        mean = torch.stack(vectors).mean(0)
        classes.append(mean / mean.norm())
    hits = {1: 0, 5: 0}
    for batch in evaluation_batches(source, towers.transform, 50):
        with torch.no_grad():
            images = towers.model(batch.images, None).image
        for image, label in zip(images.double(), batch.labels.tolist(), strict=True):
            scores = [float(image @ vector) for vector in classes]
            rank = sum(score >= scores[label] for k, score in enumerate(scores) if k != label)
            for k in hits:
                hits[k] += rank < k
    assert report["images"] == 150
    assert report["numbers"] == {"top1": hits[1] / 150, "top5": hits[5] / 150}
    assert report["chance"] == 1 / 104


def test_class_vectors_have_length_one(model):
    """For one template they are the text's own vector."""
    towers = load_towers(model)
    found = class_vectors(towers, ["red star", "blue ring"], TEMPLATES)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))
    alone = class_vectors(towers, ["red star"], ["{}"])
    torch.testing.assert_close(alone, towers.embed_texts(["red star"]))


def test_ranks():
    """Ties are misses; of several labels the nearest counts; no label is -1."""
    images = torch.eye(2)
    classes = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert class_ranks(images, torch.tensor([0, 2]), classes).tolist() == [1, 0]
    several = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert class_ranks(images, several, classes).tolist() == [0, -1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Great_White  Shark", "great white shark"),
        ("St. Bernard's dog!", "st bernards dog"),
        ("a photo of a {}.", "a photo of a {}"),
        ("猫, ネコ", "猫 ネコ"),
        ("...", ""),
    ],
)
def test_canonical(text, expected):
    """Underscores to spaces, no punctuation, lower case, single spaces; the placeholder stays."""
    assert canonical(text) == expected


def test_names_from_a_file(model, tmp_path):
    """A list in order, or an object by name or number; of several names the first."""
    source = open_source(DATA, "val")
    file = tmp_path / "names.json"
    file.write_text(json.dumps([f"Thing_{k}" for k in range(104)]))
    assert zeroshot(model, DATA, classes=file, templates=["{}"])["classes"][:2] == ["thing 0", "thing 1"]
    file.write_text(json.dumps({source.classes[0]: ["first", "other"]} | {str(k): f"n{k}" for k in range(1, 104)}))
    assert read_names(file, source.classes)[:2] == ["first", "n1"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('["crane", "Crane."]', "the classes 0 and 1 are both called 'crane'.*--classes"),
        ('["a"]', "names 1 classes, but the data has 2"),
        ('{"0": "a"}', "has no name for the class 'x2'"),
        ('["a", 3]', "a name is a string"),
        ('["a", null]', "a name is a string"),
        ('["a", "??"]', "class 1 has no name that can be said"),
        ("{", "not valid JSON"),
        ("3", "must be a list of names, or an object"),
    ],
)
def test_wrong_class_lists(content, words, tmp_path):
    """Duplicates and all else that cannot be: refused with a sentence."""
    from types import SimpleNamespace

    from softmoe.evaluate.towers import class_names

    file = tmp_path / "names.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=words):
        class_names(SimpleNamespace(classes=("x1", "x2")), file)


def test_templates():
    """One place for the name each."""
    assert check_templates(["A {}!"]) == ("a {}",)
    for wrong in (["a photo"], ["{} and {}"], []):
        with pytest.raises(ValueError, match="template"):
            check_templates(wrong)


def test_data_without_classes(model, tmp_path):
    """Says what to do instead."""
    from PIL import Image

    (tmp_path / "p" / "val").mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "p" / "val" / "a.png")
    with pytest.raises(ValueError, match=r"has no classes.*softmoe retrieve"):
        zeroshot(model, f"pairs:{tmp_path / 'p'}")
