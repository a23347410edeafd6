"""Folders of photos as people have them: classes without train/ and val/, one split alone, train/ and test/."""

import re
import shutil
from pathlib import Path

import pytest

from softmoe.data import Source, open_source


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes, of 40, 9 and 2 images."""
    for name, count in (("ant", 40), ("bee", 9), ("cat", 2)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "photos" / name / f"{number}.jpg").write_bytes(b"x" * (number + 1))
    return tmp_path / "photos"


def names(source: Source) -> set[str]:
    return {f"{source.classes[int(label)]}/{size}" for label, size in zip(source.labels, source._sizes, strict=True)}  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("prefix", ["folder:", ""])
def test_a_tenth_of_each_class(photos: Path, prefix: str, caplog: pytest.LogCaptureFixture):
    """Without splits train and val share nothing and are everything; val has a tenth of each class, at least one image;
    that is said once."""
    train, val, whole = (open_source(f"{prefix}{photos}", split) for split in ("train", "val", "all"))
    assert train.classes == val.classes == ("ant", "bee", "cat")
    assert (len(train), len(val), len(whole)) == (45, 6, 51)
    assert not names(train) & names(val)
    assert names(train) | names(val) == names(whole)
    assert len({train.fingerprint, val.fingerprint, whole.fingerprint}) == 3
    if prefix:
        assert caplog.messages == [
            f"{photos} has no train/ and val/: 6 of its 51 images are kept for validation, always the same 10 % of "
            f"each class ({photos}?val=0.2 keeps another share)"
        ]


def test_classes_of_one_image(photos: Path, caplog: pytest.LogCaptureFixture):
    """Those that have no image for validation are named, eight of them at most."""
    for number in range(10):
        (photos / f"rare{number}").mkdir()
        (photos / f"rare{number}" / "a.jpg").write_bytes(b"x")
    open_source(str(photos), "train")
    named = ", ".join(f"rare{number}" for number in range(8))
    assert caplog.messages[0].endswith(f"; none of {named} and 2 more classes, which have one image each")


def test_a_folder_to_test_on(photos: Path, caplog: pytest.LogCaptureFixture):
    """Where validation images are asked for and no others, the note says how to have all of them."""
    open_source(str(photos), "val")
    assert caplog.messages[0].endswith(
        f"({photos}?val=0.2 keeps another share, --split all takes all, in training --data.val-split all)"
    )


@pytest.mark.parametrize(("ending", "why"), [("", "no class has two"), ("?val=0", "?val=0 keeps none")])
def test_nothing_for_validation(tmp_path: Path, ending: str, why: str, caplog: pytest.LogCaptureFixture):
    """Classes of one image each, or a share of nothing, can be trained on; to ask for validation images is refused."""
    for name in ("ant", "bee"):
        (tmp_path / "single" / name).mkdir(parents=True)
        (tmp_path / "single" / name / "a.jpg").write_bytes(b"x")
    where = f"{tmp_path / 'single'}{ending}"
    assert len(open_source(where, "train")) == len(open_source(where, "all")) == 2
    assert caplog.messages == []
    with pytest.raises(ValueError, match=f"no images for validation: {re.escape(why)}; add some, or name others"):
        open_source(where, "val")
    (tmp_path / "single" / "bee" / "a.jpg").unlink()
    with pytest.raises(ValueError, match=r"no images for validation: it has one image; add some"):
        open_source(f"pairs:{tmp_path / 'single'}", "val")


def test_one_process_of_many_says_it(photos: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Only the first process of a run says that a part is kept for validation."""
    monkeypatch.setenv("RANK", "1")
    open_source(str(photos), "train")
    assert caplog.messages == []
    monkeypatch.setenv("RANK", "0")
    open_source(str(photos), "train")
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("packed", ["", "tar", "gztar"])
def test_images_that_are_not_read(photos: Path, packed: str, caplog: pytest.LogCaptureFixture):
    """Photos of a phone that nothing here can read are counted in one line, said once; hidden files are not."""
    for number in range(8):
        (photos / "ant" / f"IMG_{number}.HEIC").write_bytes(b"x")
    for name in ("a.avif", "._b.heic", "notes.txt"):
        (photos / "bee" / name).write_bytes(b"x")
    where = shutil.make_archive(str(photos), packed, photos.parent, "photos") if packed else str(photos)
    assert [len(open_source(where, split)) for split in ("all", "all")] == [51, 51]
    assert caplog.messages == [
        f"Left out of {where}, since these are not read: 1 .avif, 8 .heic; convert them to JPEG",
    ]


def test_the_choice_is_stable(photos: Path, tmp_path: Path):
    """The same on another machine and at another path; a new image does not move the others from one part to the other,
    but for the one that a larger share lets in."""
    before = names(open_source(str(photos), "val"))
    moved = shutil.copytree(photos, tmp_path / "elsewhere")
    assert names(open_source(str(moved), "val")) == before
    for number in range(40, 44):
        (photos / "ant" / f"{number}.jpg").write_bytes(b"x" * (number + 1))
    after = names(open_source(str(photos), "val"))
    assert len(before & after) >= len(before) - 1


def test_names_that_are_not_utf8(photos: Path):
    """A file whose name is no text belongs to one of the two parts, as every other."""
    for number in range(9):
        (photos / "bee" / f"caf\udce9{number}.jpg").write_bytes(b"x" * (number + 10))
    train, val = (open_source(str(photos), split) for split in ("train", "val"))
    assert len(names(train) | names(val)) == len(train) + len(val) == 60


def test_other_shares(photos: Path):
    """`?val=0.5` is half of each class, `?val=0` nothing; anything that is no share is refused."""
    assert [len(open_source(f"{photos}?val=0.5", split)) for split in ("train", "val")] == [26, 25]
    assert len(open_source(f"{photos}?val=0", "train")) == 51
    for wrong in ("1", "-0.1", "half"):
        with pytest.raises(ValueError, match="The option val is a share of the images from 0 to 1"):
            open_source(f"{photos}?val={wrong}", "val")
    with pytest.raises(ValueError, match="no folder 'test' and no splits: it has train, val and all"):
        open_source(str(photos), "test")


def test_one_split_by_its_path(folder: Path):
    """photos/val is all of the validation images, whatever split is asked for, with the classes of train."""
    for split in ("val", "train"):
        one = open_source(str(folder / "val"), split)
        assert one.fingerprint == open_source(str(folder), "val").fingerprint


def test_train_and_test(folder: Path):
    """Without val/ the sentence says what can be done; `?val=0.2` takes it from train/, and test/ stays test/."""
    (folder / "val").rename(folder / "test")
    said = r"no folder 'val' \(it has test, train\); take it from train/ with .*, or name the split: --data.val-split"
    with pytest.raises(ValueError, match=said):
        open_source(str(folder), "val")
    parts = {split: open_source(f"{folder}?val=0.2", split) for split in ("train", "val", "test")}
    assert {split: len(source) for split, source in parts.items()} == {"train": 12, "val": 3, "test": 6}
    assert parts["val"].read(0).image.shape == (24, 32, 3)
    (folder / "test").rename(folder / "val")
    with pytest.raises(ValueError, match="has val/ or no train/: leave it out"):
        open_source(f"{folder}?val=0.2", "val")


@pytest.mark.parametrize(("train", "val"), [("Train", "Validation"), ("training", "VALID"), ("train", "valid")])
def test_splits_in_other_spellings(folder: Path, tmp_path: Path, train: str, val: str):
    """Train/ and Validation/ are train/ and val/: as a folder, as a tar, each by its own path, and of pairs;
    `?val=0.2` is refused beside them."""
    before = {split: open_source(str(folder), split).fingerprint for split in ("train", "val")}
    pairs = {split: open_source(f"pairs:{folder}", split).fingerprint for split in ("train", "val")}
    (folder / "train").rename(folder / train)
    (folder / "val").rename(folder / val)
    tar = shutil.make_archive(str(tmp_path / "all"), "tar", tmp_path, "set")
    for split, name in (("train", train), ("val", val)):
        assert open_source(str(folder), split).fingerprint == open_source(tar, split).fingerprint == before[split]
        assert open_source(str(folder / name), split).fingerprint == before[split]
        assert open_source(f"pairs:{folder}", split).fingerprint == pairs[split]
    assert open_source(str(folder), "val")[0].name == f"{val}/n1/im0.jpg"
    for where, split in ((folder, "train"), (folder, "val"), (tar, "val")):
        with pytest.raises(ValueError, match="has val/ or no train/: leave it out"):
            open_source(f"{where}?val=0.2", split)


@pytest.mark.parametrize("other", ["Test", "Valid and Validation"])
def test_splits_that_do_not_say_which_is_val(folder: Path, other: str):
    """Train/ and Test/, or two that may be val/, are refused as train/ and test/ are; they are never classes."""
    (folder / "train").rename(folder / "Train")
    for name in other.split(" and "):
        shutil.copytree(folder / "val", folder / name)
    shutil.rmtree(folder / "val")
    said = rf"no folder 'val' \(it has .*Train.*\); take it from Train/ with .*--data.val-split {other.split()[0]} in"
    with pytest.raises(ValueError, match=said):
        open_source(str(folder), "val")
    assert len(open_source(f"{folder}?val=0.2", "val")) == 3


def test_classes_with_names_of_splits(photos: Path):
    """Beside other classes Train is one too, and a folder of photos may be called Test; images without classes in
    Train/ and Test/ are refused."""
    (photos / "cat").rename(photos / "Train")
    assert open_source(str(photos), "train").classes == ("Train", "ant", "bee")
    alone = photos.rename(photos.parent / "Test")
    assert len(open_source(str(alone), "val")) == 6
    (alone / "bee").rename(alone / "Test")
    with pytest.raises(ValueError, match="Train holds no images in class folders"):
        open_source(str(alone), "train")


def test_images_without_classes(photos: Path):
    """Images that lie in the folder itself have no class, and the sentence says where to put them."""
    with pytest.raises(ValueError, match=r"holds images but no class folders; put them at .*ant/<class>/<image>"):
        open_source(str(photos / "ant"), "train")


def test_captions_without_classes(photos: Path):
    """Where captions lie beside the images, the sentence leads to pairs:PATH."""
    (photos / "ant" / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"no class folders; put them at .*ant/<class>/<image>"):
        open_source(str(photos / "ant"), "train")
    (photos / "ant" / "3.txt").write_text("an ant")
    said = f"no class folders; did you mean pairs:{photos / 'ant'}, for the captions beside them?"
    with pytest.raises(ValueError, match=re.escape(said)):
        open_source(str(photos / "ant"), "train")


def test_pairs(photos: Path, caplog: pytest.LogCaptureFixture):
    """Captioned photos need no splits either; they have no classes to speak of."""
    train, val = (open_source(f"pairs:{photos}", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (46, 5)
    assert train.fingerprint != val.fingerprint
    assert caplog.messages == [
        f"{photos} has no train/ and val/: 5 of its 51 images are kept for validation, always the same 10 % "
        f"(pairs:{photos}?val=0.2 keeps another share)"
    ]


def test_validation_from_the_training_pairs(photos: Path, tmp_path: Path):
    """`?val=0.2` takes a fifth of train/ where there is no val/, and is refused where there is one."""
    folder = tmp_path / "split"
    shutil.copytree(photos, folder / "train")
    train, val = (open_source(f"pairs:{folder}?val=0.2", split) for split in ("train", "val"))
    assert (len(train), len(val), len(open_source(f"pairs:{folder}", "train"))) == (41, 10, 51)
    assert not set(train._names) & set(val._names)  # pyright: ignore[reportAttributeAccessIssue]
    shutil.copytree(photos / "ant", folder / "val")
    with pytest.raises(ValueError, match="The option val takes images from train/"):
        open_source(f"pairs:{folder}?val=0.2", "train")


def test_a_tar_without_splits(photos: Path, tmp_path: Path):
    """`tar c photos` is the same data."""
    tar = shutil.make_archive(str(tmp_path / "all"), "tar", tmp_path, "photos")
    for split in ("train", "val", "all"):
        assert open_source(tar, split).fingerprint == open_source(str(photos), split).fingerprint
