"""`softmoe predict` on image files."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import softmoe
from softmoe.cli import evaluate, main
from softmoe.models import create_model

TINY = {"image_size": 16, "width": 16, "heads": 2, "mlp_dim": 16, "depth": 1}


@pytest.fixture
def model(tmp_path):
    made = create_model("soft_ti8_2e", num_classes=3, **TINY)
    torch.nn.init.normal_(made.head.weight)
    softmoe.save_pretrained(made, tmp_path / "model", classes=["cat", "dog", "eel"])
    return tmp_path / "model"


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "images" / "sub").mkdir(parents=True)
    for name in ("a.png", "b.jpg", "sub/c.png"):
        Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(tmp_path / "images" / name)
    return tmp_path / "images"


def expected(model, path) -> torch.Tensor:
    """Probabilities of one image, by hand."""
    from softmoe.evaluate import evaluation_transform
    from softmoe.storage import open_saved

    transform = evaluation_transform(open_saved(model).preprocessing)
    pixels = np.asarray(Image.open(path).convert("RGB"))
    with torch.no_grad():
        return softmoe.from_pretrained(model)(transform(pixels, np.random.default_rng(0))[None]).softmax(1)[0]


def test_text(model, images, capsys):
    """One line per image, the likeliest class first."""
    assert main(["predict", str(model), str(images / "a.png"), "--top", "2"]) == 0
    line = capsys.readouterr().out.strip()
    values, classes = expected(model, images / "a.png").topk(2)
    names = ["cat", "dog", "eel"]
    said = ", ".join(f"{names[c]} {v:.1%}" for v, c in zip(values.tolist(), classes.tolist(), strict=True))
    assert line == f"{images / 'a.png'}: {said}"


def test_progress(model, images, capsys, monkeypatch):
    """A terminal is told how many images are done, unreadable ones counted; a log or a pipe gets no such line."""
    (images / "b.jpg").write_bytes(b"not an image")
    assert main(["predict", str(model), str(images)]) == 1
    assert "predicting" not in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["predict", str(model), str(images)]) == 1
    shown = capsys.readouterr().err
    assert all(f"predicting: {done} of 3 images" in shown for done in (1, 2, 3))


def test_names_that_are_not_text(model, images, capsys):
    """A file whose name is not UTF-8, as old archives have them, is an image like any other."""
    odd = images / os.fsdecode(b"\xff\xfe.jpg")
    (images / "b.jpg").rename(odd)
    assert main(["predict", str(model), str(odd), str(images)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_folder_glob_json_and_features(model, images, tmp_path, capsys):
    """Folders and patterns, in batches; the rows of the .npy file are the images printed, in order."""
    out = tmp_path / "vectors.npy"
    arguments = [str(images), str(images / "*.png"), "--json", "--features", str(out), "--batch-size", "2"]
    assert main(["predict", str(model), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    names = [row["image"] for row in report["predictions"]]
    assert names == [str(images / name) for name in ("a.png", "b.jpg", "sub/c.png")]
    assert report["unreadable"] == []
    vectors = np.load(out)
    assert vectors.shape == (3, 16)
    head = softmoe.from_pretrained(model).head
    with torch.no_grad():
        again = head(torch.from_numpy(vectors)).softmax(1)
    for row, shares in zip(report["predictions"], again, strict=True):
        assert [c["probability"] for c in row["classes"]] == pytest.approx(shares.sort(descending=True).values.tolist())
        assert sum(c["probability"] for c in row["classes"]) == pytest.approx(1)


def test_unreadable_images(model, images, capsys):
    """They are named with the reason and skipped; the others are predicted; the exit code is 1."""
    (images / "a.png").write_text("no image")
    assert main(["predict", str(model), str(images), str(images / "gone.png")]) == 1
    output = capsys.readouterr()
    assert output.out.count("\n") == 2
    assert f"softmoe: unreadable: {images / 'a.png'}: " in output.err
    assert f"softmoe: unreadable: {images / 'gone.png'}: No such file" in output.err


def test_nothing_readable(model, images, tmp_path, capsys):
    """Features of nothing are not written."""
    (images / "a.png").write_text("no image")
    out = tmp_path / "vectors.npy"
    assert main(["predict", str(model), str(images / "a.png"), "--features", str(out)]) == 2
    assert "none of the images could be read" in capsys.readouterr().err
    assert not out.exists()


def test_without_a_head(images, tmp_path, capsys):
    """A model that only gives features says how many, and writes them."""
    softmoe.save_pretrained(create_model("vit_ti8", num_classes=None, **TINY), tmp_path / "m")
    out = tmp_path / "vectors.npy"
    assert main(["predict", str(tmp_path / "m"), str(images / "a.png"), "--features", str(out)]) == 0
    assert capsys.readouterr().out == f"{images / 'a.png'}: 16 features\n{out}\n"
    assert np.load(out).shape == (1, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{images}", "--features", "{images}"], "is a folder; give the name of a new file"),
        (["{images}", "--features", "{images}/a.png"], "a.png is there already: choose another --features"),
        (["{images}", "--features", "{images}/a.png/x.npy"], "a.png is a file; choose another place"),
        (["{images}", "--csv", "{images}/a.png/x.csv"], "a.png is a file; choose another place"),
        (["{images}", "--top", "0"], "top must be at least 1"),
        (["{images}/*.gif"], "no file matches"),
    ],
)
def test_mistakes_are_one_line(arguments, message, model, images, capsys):
    """Each ends in one line and exit code 2."""
    assert main(["predict", str(model), *(a.format(images=images) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_from_python(model, images):
    """Two lines of Python: predictions and unreadable files."""
    (images / "b.jpg").write_text("no image")
    predictions, unreadable = softmoe.evaluate.predict(model, images, top=1)
    assert [len(p.top) for p in predictions] == [1, 1]
    assert "features" not in repr(predictions)
    assert [u.name for u in unreadable] == [str(images / "b.jpg")]


def test_things_that_are_no_names(model, images):
    """A model, an array or an opened picture in the place of a name is refused in a sentence."""
    net, picture = softmoe.from_pretrained(model), Image.new("RGB", (8, 8))
    for call in (lambda: softmoe.predict(net, images), lambda: softmoe.evaluate(net, str(images))):
        with pytest.raises(ValueError, match="a Hub id, not a VisionTransformer: save it first with softmoe"):
            call()
    for wrong, kind in ((picture, "Image"), ([np.asarray(picture)], "ndarray"), (np.asarray(picture), "ndarray")):
        with pytest.raises(ValueError, match=f"images are paths, folders or patterns, not a {kind}: "):
            softmoe.predict(model, wrong)


@pytest.mark.parametrize("weights", ["float32", "int8", "mapped"])
def test_prepared_weights(weights, images, tmp_path, capsys):
    """`--weights` gives the same classes, with nearly the same probabilities."""
    model = tmp_path / "soft"
    made = create_model("soft_ti8_2e", num_classes=3, **TINY | {"depth": 2})
    torch.nn.init.normal_(made.head.weight)
    softmoe.save_pretrained(made, model)
    said = []
    for options in ([], ["--weights", weights]):
        assert main(["predict", str(model), str(images), "--json", *options]) == 0
        said.append(json.loads(capsys.readouterr().out)["predictions"])
    for plain, prepared in zip(*said, strict=True):
        assert [c["class"] for c in prepared["classes"]] == [c["class"] for c in plain["classes"]]
        shares = [[c["probability"] for c in row["classes"]] for row in (prepared, plain)]
        assert shares[0] == pytest.approx(shares[1], abs=2e-2)


def test_table(model, images, tmp_path, capsys):
    """--csv has a row for each image with classes and probabilities, and is never written over."""
    path = tmp_path / "found.csv"
    assert main(["predict", str(model), str(images), "--top", "2", "--csv", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(path)  # where it is, as the last line
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["image", "class_1", "probability_1", "class_2", "probability_2"]
    assert sorted(row[0] for row in rows) == sorted(str(images / name) for name in ("a.png", "b.jpg", "sub/c.png"))
    for row in rows:
        assert float(row[2]) == pytest.approx(float(expected(model, row[0]).max()), abs=1e-5)
    assert main(["predict", str(model), str(images), "--csv", str(path)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_many_images_are_in_the_table_alone(model, images, tmp_path, capsys, monkeypatch):
    """With --csv the first few predictions are printed, and how many more the file has; without it all are."""
    monkeypatch.setattr(evaluate, "SHOWN", 1)
    path = tmp_path / "found.csv"
    assert main(["predict", str(model), str(images), "--csv", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:] == [f"... and 2 more in {path}", str(path)]
    assert len(path.read_text().splitlines()) == 4
    assert main(["predict", str(model), str(images)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
def test_a_device_that_is_full_is_named(model, images, capsys):
    """A device that takes no more bytes is named in the error, though it is no plain file."""
    assert main(["predict", str(model), str(images), "--csv", "/dev/full"]) != 0
    assert "/dev/full" in capsys.readouterr().err
