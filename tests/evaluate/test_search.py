"""A sentence finds images; the page is safe whatever things are called."""

import os
import re

import numpy as np
import pytest
import torch
from PIL import Image
from two_towers import save

from softmoe.data import open_source
from softmoe.evaluate import load_towers, search
from softmoe.evaluate.find import Hit, Hits, write_page


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    source = open_source("shapes?size=16", "val")
    for k in range(6):
        Image.fromarray(source[k].image).save(folder / ("more" if k % 2 else ".") / f"p{k}.png")
    (folder / "broken.jpg").write_bytes(b"no image")
    return folder


def test_nearest_first(photos, tmp_path):
    """All readable images by their cosine with the text, computed one by one."""
    model = save(tmp_path / "model")
    found = search(model, "a red star", photos, top=4)
    assert (found.images, found.unreadable, len(found.hits)) == (6, 1, 4)
    towers = load_towers(model)
    text = towers.embed_texts(["a red star"])[0]
    scores = {}
    for path in photos.rglob("*.png"):
        pixels = towers.transform(np.asarray(Image.open(path)), None)[None]  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            scores[path.name] = float(towers.model(pixels, None).image[0] @ text)
    expected = sorted(scores, key=lambda name: -scores[name])[:4]
    assert [hit.path.name for hit in found.hits] == expected
    for hit in found.hits:
        assert hit.score == pytest.approx(scores[hit.path.name], abs=1e-5)


def test_a_changed_file_is_looked_at_again(photos, tmp_path):
    """The cache knows files by name, size and time."""
    model = save(tmp_path / "model")
    before = {hit.path.name: hit.score for hit in search(model, "a red star", photos).hits}
    Image.new("RGB", (40, 40), "red").save(photos / "p0.png")
    after = {hit.path.name: hit.score for hit in search(model, "a red star", photos).hits}
    assert after["p0.png"] != before["p0.png"]
    assert after["p1.png"] == pytest.approx(before["p1.png"], abs=1e-6)


def test_the_page_escapes_everything(tmp_path):
    """Text and names from strangers stand on the page as text; nothing but pictures is loaded."""
    picture = tmp_path / "<img src=x onerror=alert(1)>.png"
    Image.new("RGB", (9, 9), "blue").save(picture)
    page = write_page(Hits('<script>alert("q")</script>', (Hit(picture, 0.5),), 1, 0), tmp_path / "out" / "page.html")
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "onerror=alert(1)>" not in text
    assert "default-src 'none'" in text
    assert len(re.findall(r'<img src="data:image/jpeg;base64,[A-Za-z0-9+/=]+"', text)) == 1


def test_mistakes(photos, tmp_path):
    """No text, nothing found, no images."""
    model = save(tmp_path / "model")
    with pytest.raises(ValueError, match="the text to search for is empty"):
        search(model, " \n", photos)
    with pytest.raises(ValueError, match="top must be at least 1"):
        search(model, "x", photos, top=0)
    with pytest.raises(ValueError, match="there is no image file"):
        search(model, "x", tmp_path / "nothing.jpg")


def test_paths_that_do_not_exist_are_named(photos, tmp_path):
    """A second sentence is not taken for a folder and dropped; links that lead nowhere count as unreadable."""
    model = save(tmp_path / "model")
    with pytest.raises(ValueError, match="no image file or folder 'a blue car'"):
        search(model, "a red star", [photos, "a blue car"])
    (photos / "dangling.jpg").symlink_to(photos / "nowhere.jpg")
    os.mkfifo(photos / "pipe.jpg")
    found = search(model, "a red star", photos)
    assert (found.images, found.unreadable) == (6, 3)
