"""WebDataset shards."""

import json
import pickle

import numpy as np
import pytest

from softmoe.data import open_source, open_splits
from softmoe.data.wds import expand
from softmoe.train import DataSection, TrainConfig
from softmoe.train.data import open_sources


@pytest.fixture
def shards(tmp_path, picture, encoded, write_tar):
    """Three shards of four examples: jpg or png, cls, txt; the last compressed."""
    for s in range(3):
        files = {}
        for k in range(4):
            key, form = f"{s}{k:03d}", ("png", "PNG") if k % 2 else ("jpg", "JPEG")
            files[f"{key}.{form[0]}"] = encoded(picture(10 * s + k), form[1])
            files[f"{key}.cls"] = str((s + k) % 5).encode()
            files[f"{key}.txt"] = f"picture {key}\n\nanother of {key}\n".encode()
        name = f"train-{s:03d}.tar" + (".gz" if s == 2 else "")
        write_tar(tmp_path / name, files, "w:gz" if s == 2 else "w")
    return tmp_path


def test_reads_all(shards, picture):
    """Images, labels and captions of all shards in order, plain and compressed."""
    source = open_source(f"wds:{shards}/{{split}}-{{000..001}}.tar", "train")
    assert len(source) == 8
    assert source.classes == ("0", "1", "2", "3", "4")
    example = source[5]
    assert (example.labels, example.name) == ((2,), "train-001.tar/1001")
    assert example.captions == ("picture 1001", "another of 1001")
    assert np.array_equal(example.image, picture(11))
    packed = open_source(f"wds:{shards}/train-002.tar.gz", "train")
    assert packed[1].name == "train-002.tar.gz/2001"
    assert len(open_source(f"wds:{shards}/{{split}}-*", "train")) == 12


def test_pickles(shards):
    """A worker's copy reads the same."""
    source = open_source(f"wds:{shards}/train-*", "train")
    source[0]
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy[9].image, source[9].image)
    assert copy.fingerprint == source.fingerprint


def test_class_names(shards):
    """classes.json beside the shards, or a stated number."""
    assert len(open_source(f"wds:{shards}/train-000.tar?classes=7", "train").classes) == 7
    (shards / "classes.json").write_text(json.dumps(["a", "b", "c", "d", "e", "f"]))
    assert open_source(f"wds:{shards}/train-000.tar", "train").classes == ("a", "b", "c", "d", "e", "f")
    (shards / "classes.json").write_text(json.dumps({"0": "zero", "1": "one"}))
    assert open_source(f"wds:{shards}/train-000.tar", "train").classes == ("zero", "one", "2", "3")


def test_json_and_several_labels(tmp_path, picture, encoded, write_tar):
    """json gives labels and captions; a list makes the set multi-label, also where it is empty."""
    files = {}
    for k, facts in enumerate(
        ({"label": [0, 2], "caption": "two"}, {"label": []}, {"label": [1], "captions": ["a", "b"]})
    ):
        files[f"{k}.jpeg"], files[f"{k}.json"] = encoded(picture(k)), json.dumps(facts).encode()
    source = open_source(f"wds:{write_tar(tmp_path / 'a.tar', files)}", "train")
    assert source.multi_label
    assert [source[k].labels for k in range(3)] == [(0, 2), (), (1,)]
    assert [source[k].captions for k in range(3)] == [("two",), (), ("a", "b")]


def test_captions_only(tmp_path, picture, encoded, write_tar):
    """Without labels there are no classes."""
    source = open_source(
        f"wds:{write_tar(tmp_path / 'a.tar', {'x.jpg': encoded(picture(1)), 'x.txt': b'hello'})}", "train"
    )
    assert (source.classes, source[0].labels, source[0].captions) == ((), (), ("hello",))


def test_blocks(shards):
    """With order=shards the source tells its shard sizes."""
    source = open_source(f"wds:{shards}/train-*?order=shards&mix=2", "train")
    assert (source.blocks, source.mix) == ((4, 4, 4), 2)


def test_expand(tmp_path):
    """Ranges keep their zeros; lists and ranges multiply."""
    for name in ("a-08", "a-09", "a-10", "b-08", "b-09", "b-10"):
        (tmp_path / name).touch()
    assert [p.name for p in expand(f"{tmp_path}/{{a,b}}-{{08..10}}")] == [
        "a-08",
        "a-09",
        "a-10",
        "b-08",
        "b-09",
        "b-10",
    ]


def test_mistakes(shards, write_tar, picture, encoded):
    """Each mistake has its own sentence."""
    image = encoded(picture(1))
    for uri, split, words in (
        (f"wds:{shards}/train-{{000..005}}.tar", "train", "No file .*train-002.tar"),
        (f"wds:{shards}/train-{{x}}.tar", "train", "neither a range"),
        (f"wds:{shards}/train-000.tar?classes=2", "train", "label 3, outside the 2 classes"),
        (f"wds:{shards}/train-000.tar?order=up", "train", "'examples' or 'shards'"),
        (
            f"wds:{write_tar(shards / 'c.tar', {'x.jpg': image, 'x.cls': b'cat'})}",
            "train",
            "c.tar/x .*class number.*'cat'",
        ),
        (f"wds:{write_tar(shards / 'd.tar', {'x.txt': b'hi'})}", "train", "no images"),
        (f"wds:{write_tar(shards / 'e.tar', {'x.jpg': image, 'x.cls': b'1', 'y.jpg': image})}", "train", "y has none"),
    ):
        with pytest.raises(ValueError, match=words):
            open_source(uri, split)


def test_shards_without_the_name_of_a_split(shards):
    """They are taken as they are for the split they are named for, and not for two splits at once."""
    first, second = (f"wds:{shards}/train-00{number}.tar?classes=5" for number in range(2))
    train, val = open_sources(TrainConfig(data=DataSection(train=first, val=second)))
    assert [source[0].captions for source in (train, val)] == [
        ("picture 0000", "another of 0000"),
        ("picture 1000", "another of 1000"),
    ]
    with pytest.raises(ValueError, match="gives the same images for 'train' and 'val'"):
        open_sources(TrainConfig(data=DataSection(train=first)))
    with pytest.raises(ValueError, match=r"gives the same images for 'train' and 'val': .* write \{split\} where"):
        open_splits(f"wds:{shards}/train-000.tar", "train", "val")
