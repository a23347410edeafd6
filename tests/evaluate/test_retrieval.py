"""Recall both ways against brute force, ties, blocks, several captions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from two_towers import save

from softmoe.data import open_source
from softmoe.evaluate import load_towers, retrieve
from softmoe.evaluate.towers import ranks, recalls

DATA = "shapes?size=16&length=40"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))


def brute_force(rows: Tensor, owner: Tensor, others: Tensor, owners: Tensor) -> list[int]:
    """For each row by plain loops."""
    found = []
    for row, mine in zip(rows.double(), owner.tolist(), strict=True):
        scores = [float((row * other).sum()) for other in others.double()]
        best = max(score for score, whose in zip(scores, owners.tolist(), strict=True) if whose == mine)
        found.append(sum(s >= best - 1e-9 for s, whose in zip(scores, owners.tolist(), strict=True) if whose != mine))
    return found


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 7), st.integers(0, 10_000), st.booleans())
def test_ranks_are_those_of_brute_force(images, captions, block, seed, coarse):
    """Both ways, for any number of images, captions and block; with coarse numbers there are many exact ties."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, captions + 1, (images,), generator=generator)
    owner = torch.repeat_interleave(torch.arange(images), counts)

    def vectors(rows: int) -> Tensor:
        if coarse:
            return torch.randint(-1, 2, (rows, 3), generator=generator).float()
        return torch.nn.functional.normalize(torch.randn(rows, 3, generator=generator))

    image, text, number = vectors(images), vectors(len(owner)), torch.arange(images)
    assert ranks(image, number, text, owner, block).tolist() == brute_force(image, number, text, owner)
    assert ranks(text, owner, image, number, block).tolist() == brute_force(text, owner, image, number)


def test_a_model_that_says_the_same_of_all_gets_nothing():
    """Ties count against it: every rank is the last."""
    same = torch.ones(5, 3)
    number = torch.arange(5)
    assert ranks(same, number, same, number).tolist() == [4] * 5


def test_recalls():
    """Shares below 1, 5 and 10, and the median place counted from 1."""
    found = recalls(torch.tensor([0, 4, 5, 9, 100]))
    assert found == {"recall@1": 0.2, "recall@5": 0.4, "recall@10": 0.8, "median_rank": 6.0}


def test_retrieve(tmp_path):
    """From files to numbers: the same as with all images and captions in hand, one by one."""
    model = save(tmp_path / "model")
    report = retrieve(model, DATA)
    towers, source = load_towers(model), open_source(DATA, "val")
    images, texts, owner = [], [], []
    for k in range(40):
        with torch.no_grad():
            pixels = towers.transform(source[k].image, None)[None]  # pyright: ignore[reportArgumentType]
            images.append(towers.model(pixels, None).image[0])
        texts += source[k].captions
        owner += [k] * len(source[k].captions)
    image, text, owners, number = torch.stack(images), towers.embed_texts(texts), torch.tensor(owner), torch.arange(40)
    assert (report["images"], report["captions"], report["left_out"]) == (40, 80, 0)
    assert report["image_to_text"] == recalls(torch.tensor(brute_force(image, number, text, owners)))
    assert report["text_to_image"] == recalls(torch.tensor(brute_force(text, owners, image, number)))


def test_images_without_captions_are_left_out(tmp_path):
    """And counted."""
    from PIL import Image

    root = tmp_path / "photos" / "val"
    root.mkdir(parents=True)
    source = open_source("shapes?size=16", "val")
    for k in range(4):
        Image.fromarray(source[k].image).save(root / f"{k}.png")
        if k:
            (root / f"{k}.txt").write_text(source[k].captions[0])
    report = retrieve(save(tmp_path / "model"), f"pairs:{tmp_path / 'photos'}")
    assert (report["images"], report["captions"], report["left_out"]) == (3, 3, 1)
