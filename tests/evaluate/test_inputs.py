"""From names on a command line to models, sources and files."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import two_towers
from PIL import Image

import softmoe
from softmoe.data import Example, evaluation_batches, open_source
from softmoe.evaluate import inputs
from softmoe.evaluate.classify import Predictor
from softmoe.evaluate.inputs import (
    Relabeled,
    compute_in,
    evaluation_transform,
    find_images,
    load,
    match_classes,
    random_subset,
)
from softmoe.machine import bfloat16_works
from softmoe.models import create_model
from softmoe.storage import Preprocessing, open_saved
from softmoe.storage.files import write_json


class Source:
    """Three classes of gray images."""

    multi_label = False
    fingerprint = "gray"

    def __init__(self, classes=("cat", "dog", "eel")):
        self.classes = classes

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return self.read(index)

    def read(self, index, min_side=None):
        return Example(np.full((8, 8, 3), index, np.uint8), (index % 3,), name=str(index))


def test_load_at_another_size(tmp_path, caplog):
    """The saved preprocessing is used; a size given replaces its size only."""
    model = create_model("vit_ti8", image_size=16, width=16, heads=2, mlp_dim=16, depth=1, num_classes=2)
    softmoe.save_pretrained(model, tmp_path / "m", preprocessing=Preprocessing((16, 16), "resize"))
    assert load(tmp_path / "m").transform.config.size == (16, 16)
    wider = load(tmp_path / "m", image_size=(24, 32))
    assert wider.transform.config.size == (24, 32)
    assert wider.transform.crop == "resize"
    assert wider.class_names() == ("class 0", "class 1")
    assert load(tmp_path / "m", image_size=8).preprocessing.image_size == (8, 8)
    assert not caplog.messages
    load(tmp_path / "m", image_size=(24, 36))
    assert "the last 4 of the 36 pixels of the width are not seen" in caplog.text


@pytest.mark.skipif(not bfloat16_works(), reason="this processor has no working bfloat16")
@pytest.mark.parametrize("towers", [False, True])
def test_a_precision_ends_with_the_call_and_copies_are_models_of_their_own(towers):
    """Autocast is off after a model in bfloat16 has run, and a copy of it computes with its own weights."""
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    model = two_towers.two_towers() if towers else two_towers.two_towers().image

    def run(m):
        return m(images, torch.ones(2, 16, dtype=torch.int64)).image if towers else m(images)

    with torch.inference_mode():
        exact = run(model)
        coarse = run(compute_in("bfloat16", model))
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.equal(coarse, exact)
        other = copy.deepcopy(model)
        assert torch.equal(run(other), coarse)
        for weight in other.parameters():
            weight.zero_()
        assert not torch.equal(run(other), coarse)
        assert torch.equal(run(model), coarse)
        assert torch.equal(run(compute_in("float32", model)), exact)


@pytest.mark.skipif(not bfloat16_works(), reason="this processor has no working bfloat16")
def test_a_prediction_in_bfloat16_is_near_that_in_float32(tmp_path):
    """The classes of an image get nearly the same shares in both precisions."""
    options = {"width": 16, "heads": 2, "mlp_dim": 16, "depth": 1, "num_classes": 2, "representation_size": 8}
    model = create_model("vit_ti8", image_size=16, **options)
    torch.nn.init.normal_(model.head.weight)
    softmoe.save_pretrained(model, tmp_path / "m")
    shares = []
    for precision in ("float32", "bfloat16"):
        loaded = load(tmp_path / "m", device="cpu", precision=precision)
        (found,) = Predictor(loaded).predict(["x"], torch.ones(1, 3, 16, 16))
        shares.append(dict(found.top))
    assert shares[1] == pytest.approx(shares[0], abs=0.05)


def test_transform_is_that_of_evaluation():
    """No randomness: the same image twice is the same tensor."""
    transform = evaluation_transform(Preprocessing((12, 12), "central", 1.5))
    image = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    first, second = (transform(image, np.random.default_rng(seed)) for seed in (0, 1))
    assert (first == second).all()
    assert not transform.train


def test_plain_paths_are_folders(tmp_path):
    """A path that exists needs no `folder:`; anything else is a source's name."""
    for name in ("train/a/1.png", "val/a/2.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    assert len(open_source(str(tmp_path), "val")) == 1
    assert len(open_source("shapes?length=7", "val")) == 7
    with pytest.raises(ValueError, match="There is no folder"):
        open_source(str(tmp_path / "none"), "val")


def test_random_subset():
    """The same examples every time, all different, in order; with another fingerprint; fast reading kept."""
    source = open_source("shapes?size=8", "val")
    some = random_subset(source, 40)
    assert len(some) == 40
    assert some.fingerprint == random_subset(source, 40).fingerprint != source.fingerprint
    names = [example.name for example in some.read_batch(range(40))]
    assert names == [some[i].name for i in range(40)]
    assert len(set(names)) == 40
    assert random_subset(source, None) is source
    assert random_subset(source, 10**6) is source
    assert random_subset(Source(), 3).read_batch is None
    assert len(pickle.loads(pickle.dumps(some))) == 40
    with pytest.raises(ValueError, match="at least 1"):
        random_subset(source, 0)


def test_match_by_name():
    """Data of some of the classes, in another order, gets the model's numbers, in single reads and in batches."""
    matched, how = match_classes(Source(("eel", "ant", "dog")), ("ant", "bee", "dog", "eel"), 4)
    assert how == "name"
    assert isinstance(matched, Relabeled)
    assert [matched[i].labels for i in range(3)] == [(3,), (0,), (2,)]
    assert matched.classes == ("ant", "bee", "dog", "eel")
    batch = next(evaluation_batches(matched, evaluation_transform(Preprocessing((8, 8), "resize")), 6))
    assert batch.labels.tolist() == [3, 0, 2, 3, 0, 2]
    source = open_source("shapes?size=8", "val")
    turned, _ = match_classes(source, source.classes[::-1], len(source.classes))
    assert turned.read_batch([0])[0].labels == (len(source.classes) - 1,)
    assert turned.fingerprint != source.fingerprint


def test_match_without_need():
    """The same names in the same order leave the source as it is; unknown names of the same number match by number."""
    source = Source()
    assert match_classes(source, source.classes, 3) == (source, "name")
    assert match_classes(source, ("x", "y", "z"), 3) == (source, "number")
    assert match_classes(source, None, 3) == (source, "number")


def test_no_match():
    """Another number of classes is refused, with a class the model does not know."""
    with pytest.raises(
        ValueError, match="has 3 classes, but the model has 4, and the model does not know its class 'eel'"
    ):
        match_classes(Source(), ("cat", "dog", "x", "y"), 4)
    with pytest.raises(ValueError, match="has no classes"):
        match_classes(Source(()), None, 4)


def test_find_images(tmp_path, caplog):
    """Files, folders with all below but hidden files, and patterns; each once, sorted; missing names stay.

    Of the images of a folder whose format is not read it is said how many there are.
    """
    for name in ("b.png", "a.JPG", "sub/c.webp", "notes.txt", "._b.png", "sub/.c.webp", "sub/phone.HEIC"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = find_images([str(tmp_path), str(tmp_path / "*.png"), str(tmp_path / "gone.png")])
    assert [p.relative_to(tmp_path).as_posix() for p in found] == ["a.JPG", "b.png", "sub/c.webp", "gone.png"]
    assert caplog.messages == [f"Left out of {tmp_path}, since these are not read: 1 .heic; convert them to JPEG"]
    deep = find_images([str(tmp_path / "**" / "*.webp")])
    assert [p.name for p in deep] == ["c.webp"]
    (tmp_path / "empty").mkdir()
    for wrong, message in {"empty": "holds no images", "*.gif": "no file matches"}.items():
        with pytest.raises(ValueError, match=message):
            find_images([str(tmp_path / wrong)])
    with pytest.raises(ValueError, match="at least one"):
        find_images([])


def test_brackets_in_a_name(tmp_path):
    """A file whose name looks like a pattern is a file."""
    (tmp_path / "photo[1].png").write_text("")
    assert find_images([str(tmp_path / "photo[1].png")]) == [tmp_path / "photo[1].png"]


def test_an_unfinished_run_is_told(tmp_path, monkeypatch, caplog):
    """Who asks a run that has no exported model yet hears that a checkpoint answers; who names the checkpoint knows. A
    run that is done, such as those of a study, is not called unfinished."""
    folder = tmp_path / "run" / "checkpoints" / "last"
    write_json(folder / "state.json", {"config": {"steps": 41}})
    saved = replace(open_saved(two_towers.save(tmp_path / "model")), folder=folder, provenance={"step": 40})
    monkeypatch.setattr(inputs, "open_saved", lambda where: saved)
    inputs.open_model(tmp_path / "run")
    assert "not finished: this is its checkpoint of step 40 of 41" in caplog.text
    caplog.clear()
    inputs.open_model(folder)
    assert not caplog.text
    write_json(folder / "state.json", {"config": {"steps": 40}})
    inputs.open_model(tmp_path / "run")
    assert not caplog.text
