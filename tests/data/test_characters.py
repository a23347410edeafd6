"""The generator of characters."""

import pickle
import shutil
import unicodedata
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from softmoe.data import characters_glyphs as glyphs
from softmoe.data import open_source
from softmoe.data.characters import COMPANIONS, INKS, PAPERS, RADII, SCENES, CharactersSource, class_name, compose, draw

FEW = "characters?classes=60"


def opened(uri: str, split: str) -> CharactersSource:
    source = open_source(uri, split)
    assert isinstance(source, CharactersSource)
    return source


@pytest.fixture(scope="module", autouse=True)
def kept_bitmaps(tmp_path_factory):
    """One cache folder for the module: bitmaps are drawn once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTMOE_CACHE", str(tmp_path_factory.mktemp("cache")))
        glyphs.load.cache_clear()
        yield
    glyphs.load.cache_clear()


@pytest.mark.parametrize("scene", SCENES)
def test_deterministic(scene):
    """An example depends on (seed, split, index) only: alone, in any batch, after pickling."""
    source = opened(f"{FEW}&scene={scene}", "train")
    batch = source.read_batch([5, 900_000, 5, 77])
    for k, index in ((0, 5), (1, 900_000), (2, 5), (3, 77)):
        alone = pickle.loads(pickle.dumps(source))[index]
        assert np.array_equal(batch[k].image, alone.image)
        assert (batch[k].labels, batch[k].captions) == (alone.labels, alone.captions)
    assert source.read_captions([77]) == [batch[3].captions]


def test_bitmaps_do_not_travel():
    """A worker gets the source without its bitmaps, which it reads from the cache folder."""
    assert len(pickle.dumps(open_source(FEW, "train"))) < 20_000


def test_streams_differ():
    """Splits, seeds and scenes share no picture, and each has a fingerprint of its own."""
    uris = [(FEW, "train"), (FEW, "val"), (f"{FEW}&seed=1", "train"), (f"{FEW}&scene=many", "train")]
    sources = [open_source(*uri) for uri in [*uris, (f"{FEW}&faces=unseen", "train")]]
    assert len({source[i].image.tobytes() for source in sources for i in range(20)}) == 100
    assert len({source.fingerprint for source in sources}) == 5


def test_sizes_and_lengths():
    """The size option draws the same scene finer; lengths can be set."""
    small, large = open_source(FEW, "val"), open_source(f"{FEW}&size=64", "val")
    a = small[3].image.astype(float)
    b = large[3].image.astype(float).reshape(32, 2, 32, 2, 3).mean((1, 3))
    assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.9
    assert small[3].captions == large[3].captions
    assert len(open_source(f"{FEW}&length=10", "train")) == 10
    with pytest.raises(IndexError, match="0 to 9"):
        open_source(f"{FEW}&length=10", "train")[10]


def test_class_sets():
    """Downstream classes are never upstream ones, and more classes begin with the fewer ones."""
    few, more, downstream = (open_source(f"characters?classes={n}", "val").classes for n in (60, 80, "downstream"))
    assert (len(few), len(downstream)) == (60, glyphs.DOWNSTREAM)
    assert more[:60] == few
    assert not set(more) & set(downstream)
    assert len(set(more)) == 80


def test_labels_are_balanced():
    """Any run of as many examples as classes holds each class once."""
    labels = [e.labels[0] for e in opened(FEW, "train").read_batch(range(1000, 1060))]
    assert sorted(labels) == list(range(60))


def test_classes_look_different():
    """No two classes have bitmaps that nearly coincide in the face by which they were chosen, and none is empty."""
    table = glyphs.load("matplotlib", 60)
    cells = table.rows[table.first[:, 0], : glyphs.CELL**2].astype(float)
    cells = cells.reshape(-1, 20, 2, 20, 2).mean((2, 4)).reshape(len(cells), -1)
    alike = np.corrcoef(cells) - np.eye(len(cells))
    assert alike.max() < 0.91
    assert (table.rows.max(1) > 200).all()


def test_the_same_shape_is_one_class():
    """Of the Latin, Greek and Cyrillic capital A, which look the same, one is kept."""
    face = glyphs._faces(tuple(glyphs.font_files("matplotlib")))[0]
    assert glyphs._distinct(face, [ord(c) for c in "A\u0391\u0410B"], None) == [ord("A"), ord("B")]


def test_faces_are_held_out():
    """A class has seen and unseen faces, and no bitmap is in both parts."""
    table = glyphs.load("matplotlib", 60)
    assert (table.count >= (3, 1)).all()
    runs = sorted(zip(table.first.ravel().tolist(), table.count.ravel().tolist(), strict=True))
    assert all(first + count == after for (first, count), (after, _) in pairwise(runs))
    assert runs[-1][0] + runs[-1][1] == len(table.rows)


def test_a_moving_character_is_anywhere_in_any_size():
    """Alone, whole inside the picture, of every size, small ones in all quarters; `one` fills the picture instead."""
    scenes = opened(f"{FEW}&scene=moving", "train").scenes(np.arange(400))
    (character,) = scenes.written
    assert np.histogram(character.radius, bins=4, range=RADII["moving"])[0].min() > 60
    assert max(np.abs(character.x + character.radius).max(), np.abs(character.y - character.radius).max()) <= 1
    small = character.radius < 0.5
    quarters = 2 * (character.x[small] > 0) + (character.y[small] > 0)
    assert np.bincount(quarters, minlength=4).min() > 10
    assert opened(FEW, "train").scenes(np.arange(400)).written[0].radius.min() > 0.7


def test_captions_tell_the_scene():
    """Captions name the class; those of several characters say truly on which side the second one stands."""
    source = opened(f"{FEW}&scene=many", "train")
    rows = np.arange(300)
    scenes = source.scenes(rows)
    main, small = scenes.written[-1], scenes.written[0]
    sides = {"above": main.y - small.y, "below": small.y - main.y}
    sides |= {"right of": main.x - small.x, "left of": small.x - main.x}
    told = 0
    for i, captions in enumerate(source.read_captions(rows)):
        assert len(set(captions)) == 2
        for caption in captions:
            assert source.classes[i % 60] in caption
            for word, side in sides.items():
                if f" {word} a small" in caption:
                    told += 1
                    assert side[i] > 0
    assert told > 300


def test_the_label_is_the_largest():
    """Scenes of many have companions, all clearly smaller than the labelled character, which is inside."""
    table = glyphs.load("matplotlib", 60)
    labels = np.arange(100) % 60
    scenes = compose(table, labels, labels, 0, "many", 7, np.arange(100))
    *others, main = scenes.written
    assert len(others) == COMPANIONS
    assert all((other.radius < 0.61 * main.radius).all() for other in others)
    assert (np.abs(np.stack([main.x, main.y])) + main.radius < 1.001).all()
    assert np.array_equal(main.label, labels)
    told = others[0]  # of which captions speak
    assert (np.abs(np.stack([told.x, told.y])) < 1).all()


def test_drawing_is_the_plain_formula():
    """Without turn, stretch, slant, light and noise, a picture is the bitmap between paper and ink."""
    table = glyphs.load("matplotlib", 60)
    scenes = compose(table, np.array([5]), np.array([5]), 0, "one", 7, np.array([0]))
    one = scenes.written[0]
    for name, value in (("x", 0.0), ("y", 0.0), ("radius", 0.8), ("angle", 0.0), ("stretch", 1.0), ("slant", 0.0)):
        setattr(one, name, np.array([value]))
    scenes.light, scenes.noise = np.array([[1.0, 0, 0]]), np.array([[0.0, 0]])
    picture = draw(table, scenes, glyphs.CELL)[0]  # at this size and radius a pixel is a cell
    cell = table.rows[one.bitmap[0], : glyphs.CELL**2].reshape(glyphs.CELL, glyphs.CELL, 1) / 255
    paper, ink = np.array(list(PAPERS.values()))[scenes.paper], np.array(list(INKS.values()))[one.ink]
    expected = paper + cell * (ink - paper)
    assert np.abs(picture - expected).max() < 1.5
    assert cell.max() == 1


def test_small_characters_use_the_smaller_bitmaps():
    """A character of a few pixels keeps its mean ink: nothing falls between the cells."""
    table = glyphs.load("matplotlib", 60)
    labels = np.arange(60)
    shares = []
    for size in (16, 64):
        scenes = compose(table, labels, labels, 0, "many", 7, labels)
        scenes.written = scenes.written[-1:]
        scenes.light, scenes.noise = np.tile([1.0, 0, 0], (60, 1)), np.zeros((60, 2))
        shares.append(draw(table, scenes, size).mean((1, 2, 3)))
    assert np.corrcoef(shares[0], shares[1])[0, 1] > 0.995
    blank = replace(table, rows=np.zeros_like(table.rows))
    coarse = replace(table, rows=np.where(np.arange(glyphs.BYTES) < glyphs.STARTS[1], 0, table.rows))
    for size, inked in ((16, True), (256, False)):
        assert ((draw(coarse, scenes, size) != draw(blank, scenes, size)).any((1, 2, 3)) == inked).all()


def test_names():
    """Classes bear Unicode's names; characters that have none stand for themselves."""
    assert class_name("β") == "greek small letter beta"
    assert class_name("森") == "ideograph 森"
    assert all(unicodedata.lookup(name.upper()) for name in open_source(FEW, "val").classes)


def test_fonts_of_a_folder(tmp_path):
    """A user's own folder of fonts gives classes, with another fingerprint."""
    for path in glyphs.font_files("matplotlib")[:4]:
        shutil.copy(path, tmp_path)
    own = open_source(f"{FEW}&fonts={tmp_path}", "val")
    assert len(own.classes) == 60
    assert own.fingerprint != open_source(FEW, "val").fingerprint


def test_mistakes_are_said(monkeypatch):
    """Wrong options and missing fonts are one sentence each."""
    for uri, words in (
        ("characters?scene=two", "scene must be one or moving or many, not 'two'"),
        ("characters?faces=old", "faces must be seen or unseen"),
        ("characters?classes=1", "or a number from 2, not '1'"),
        ("characters?size=4", "8 to 512 pixels a side, not 4"),
        ("characters?fonts=/no/such/folder", "there is no folder /no/such/folder"),
        ("characters?seed=-1", "seed must be a whole number"),
    ):
        with pytest.raises(ValueError, match=words.replace("?", r"\?")):
            open_source(uri, "train")
    monkeypatch.setattr(glyphs, "_candidates", lambda *_: [ord("A"), ord("B")])
    with pytest.raises(ValueError, match="0 upstream classes of characters that differ visibly, fewer than 70"):
        open_source("characters?classes=70", "train")
    monkeypatch.setattr(glyphs, "_SYSTEM", ())
    with pytest.raises(ValueError, match="found 0 fonts with Chinese characters"):
        open_source("characters?fonts=cjk", "train")
