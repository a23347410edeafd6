"""Class folders, and tars of them."""

import pickle
import shutil

import numpy as np
import pytest

from softmoe.data import BrokenImage, open_source


def test_reads_all(folder, picture):
    """Labels follow the sorted class folders, names come from classes.json, images are the files'."""
    train, val = open_source(f"folder:{folder}", "train"), open_source(f"folder:{folder}", "val")
    assert (len(train), len(val)) == (15, 6)
    assert train.classes == val.classes == ("ant", "bee", "cat")
    assert [train[i].labels for i in range(15)] == [(i // 5,) for i in range(15)]
    png = next(e for e in map(train.__getitem__, range(15)) if e.name == "train/n2/im1.png")
    assert np.array_equal(png.image, picture(101))
    assert all(train[i].image.shape == (24, 32, 3) for i in range(15))


@pytest.mark.parametrize("prefix", ["", "./", "mydata/"])
@pytest.mark.parametrize(("ending", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tgz", "w:gz")])
def test_tar_equals_folder(folder, tmp_path, write_tar, prefix, ending, mode):
    """A tar or tar.gz, with or without a top folder, is the same data: same examples, same fingerprint."""
    files = {prefix + str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    tar = write_tar(tmp_path / f"set.{ending}", files, mode)
    plain, packed = open_source(f"folder:{folder}", "val"), open_source(f"folder:{tar}", "val")
    assert plain.fingerprint == packed.fingerprint
    for i in range(len(plain)):
        a, b = plain[i], packed[i]
        assert (a.name, a.labels) == (b.name, b.labels)
        assert np.array_equal(a.image, b.image)


def test_unpacked_once(folder, tmp_path, write_tar):
    """The cache holds one copy, and a second opening uses it."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    tar = write_tar(tmp_path / "set.tar.gz", files, "w:gz")
    open_source(f"folder:{tar}", "train")
    (copy,) = (tmp_path / "cache").iterdir()
    before = copy.stat().st_mtime_ns
    open_source(f"folder:{tar}", "val")
    assert [c.stat().st_mtime_ns for c in (tmp_path / "cache").iterdir()] == [before]


def test_moves_and_pickles(folder, tmp_path):
    """The fingerprint does not hold the path; a pickled source reads on, and small."""
    source = open_source(f"folder:{folder}", "train")
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert open_source(f"folder:{moved}", "train").fingerprint == source.fingerprint
    sent = pickle.dumps(source)
    assert len(sent) < 4000
    assert np.array_equal(pickle.loads(sent)[3].image, source[3].image)


def test_fingerprint_changes_with_data(folder):
    """Another file, another fingerprint."""
    before = open_source(f"folder:{folder}", "train").fingerprint
    shutil.copy(folder / "train/n1/im0.jpg", folder / "train/n1/more.jpg")
    assert open_source(f"folder:{folder}", "train").fingerprint != before


def test_uncompressed_images_are_known_by_their_pixels(tmp_path, picture, encoded):
    """Variants of a set whose files have the same names and sizes are other data, and a copy is the same."""
    sets = {"plain": 0, "copy": 0, "noisy": 1}
    for name, seed in sets.items():
        (tmp_path / name / "train" / "ant").mkdir(parents=True)
        for k in range(200):
            (tmp_path / name / "train" / "ant" / f"{k}.ppm").write_bytes(encoded(picture(seed + 1000 * k, 4, 4), "PPM"))
    plain, copy, noisy = (open_source(f"folder:{tmp_path / name}", "train").fingerprint for name in sets)
    assert plain == copy != noisy


def test_nested_and_hidden_files(folder):
    """Images below a class folder count, hidden files and other endings do not."""
    (folder / "train/n1/images").mkdir()
    shutil.move(folder / "train/n1/im0.jpg", folder / "train/n1/images/im0.jpg")
    (folder / "train/n1/.DS_Store").write_bytes(b"x")
    (folder / "train/n1/notes.txt").write_text("x")
    source = open_source(f"folder:{folder}", "train")
    assert len(source) == 15
    assert "train/n1/images/im0.jpg" in {source[i].name for i in range(15)}


def test_what_zip_files_of_macos_leave(folder):
    """A folder __MACOSX beside the classes is no class, empty or not."""
    before = open_source(f"folder:{folder}", "train")
    (folder / "train/__MACOSX/n1").mkdir(parents=True)
    (folder / "train/__MACOSX/n1/._im0.jpg").write_bytes(b"x")
    assert open_source(f"folder:{folder}", "train").fingerprint == before.fingerprint


def _empty_class(root):
    (root / "train/n9").mkdir()


def _stranger(root):
    shutil.copytree(root / "val/n1", root / "val/n8")


def _no_images(root):
    for file in (root / "val").rglob("*.*"):
        file.unlink()


def _no_split(root):
    shutil.rmtree(root / "val")


def _bad_names(root):
    (root / "classes.json").write_text("[1, 2]")


@pytest.mark.parametrize(
    ("damage", "split", "words"),
    [
        (_empty_class, "train", "train/n9 holds no images"),
        (_stranger, "val", "class 'n8'"),
        (_no_images, "val", "holds no images in class folders"),
        (_no_split, "val", "no folder 'val'.*train"),
        (_bad_names, "train", "classes.json must be an object"),
    ],
)
def test_mistakes(folder, damage, split, words):
    """Each mistake has its own sentence."""
    damage(folder)
    with pytest.raises(ValueError, match=words):
        open_source(f"folder:{folder}", split)


def test_not_a_tar(tmp_path):
    """A file that is not a tar, and a truncated gz, say so."""
    (tmp_path / "x.zip").write_bytes(b"PK")
    (tmp_path / "x.tar").write_bytes(b"no tar" * 200)
    (tmp_path / "x.tar.gz").write_bytes(b"no gz")
    for name, words in (
        ("x.zip", "is a file; images come as a folder"),
        ("x.tar", "not a readable tar"),
        ("x.tar.gz", "not a whole gzip"),
    ):
        with pytest.raises(ValueError, match=words):
            open_source(f"folder:{tmp_path / name}", "train")
    assert list((tmp_path / "cache").iterdir()) == []


def test_file_removed_later(folder):
    """A file that vanished after indexing is a broken image with its name."""
    source = open_source(f"folder:{folder}", "train")
    (folder / "train/n1/im0.jpg").unlink()
    with pytest.raises(BrokenImage, match=r"train/n1/im0\.jpg"):
        [source[i] for i in range(5)]
