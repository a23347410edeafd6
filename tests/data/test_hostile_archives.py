"""Archives, labels and names made to hurt: bounded work, and one sentence that names the file."""

import gzip
import inspect
import io
import json
import os
import struct
import sys
import tarfile
from pathlib import Path

import pytest

from softmoe.data import BrokenImage, TransformConfig, open_source
from softmoe.data.files import tar_members, unpacked
from softmoe.data.source import MAX_CLASSES
from softmoe.storage.files import check_names, parse_json

pytestmark = pytest.mark.timeout(300)


def refused(call, *words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    for word in words:
        assert word in text, text


def header(name: str, size: int, kind: bytes = b"0") -> bytes:
    """A tar header whose size may be anything, as the 256-based numbers of GNU tar allow."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if size >= 0:
        block[124:136] = b"\x80" + size.to_bytes(11)
    else:
        block[124:136] = b"\xff" + (256**11 + size).to_bytes(11)
    block[148:156] = b"        "
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


@pytest.mark.parametrize("size", [-512, -1024, -(1 << 40), 1 << 40, 1 << 62])
@pytest.mark.parametrize("kind", [b"0", b"L", b"x", b"S", b"g"])
def test_sizes_that_cannot_be(tmp_path, size, kind):
    """A member that ends before it begins, or beyond the file, is refused: tarfile alone would read it for ever."""
    path = tmp_path / "bad.tar"
    path.write_bytes(header("a.jpg", 0) + header("b.jpg", size, kind) + bytes(2048))
    refused(lambda: list(tar_members(path)), "bad.tar")


def test_thousands_of_chained_names(tmp_path):
    """Long names for long names are followed by recursion, which ends in a sentence."""
    path = tmp_path / "chained.tar"
    path.write_bytes((header("x", 512, b"L") + b"name".ljust(512, b"\0")) * 3000 + bytes(1024))
    refused(lambda: list(tar_members(path)), "chained.tar")


def test_names_are_bounded(tmp_path):
    """A name of megabytes, as the newer headers allow, would come back in messages."""
    with tarfile.open(tmp_path / "long.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("a/" + "b" * 5_000_000 + ".jpg"))
    refused(lambda: list(tar_members(tmp_path / "long.tar")), "long.tar", "more than 4,096 characters")


def test_names_in_messages_are_one_short_line(tmp_path, encoded, picture, write_tar):
    """Names of control characters or thousands of letters, of examples and classes."""
    write_tar(tmp_path / "a.tar", {"a.jpg": encoded(picture(1)), "a.cls": b"0", "b\n" + "c" * 3000 + ".jpg": b""})
    refused(lambda: open_source(f"wds:{tmp_path}/a.tar", "train"), "has none", "b\\nccc")
    refused(lambda: check_names(["a\n" + "b" * 5000], "classes.json"), "control characters")


def test_members_of_one_name(tmp_path):
    """Of several members with one name, as `tar --append` leaves them, the last counts, as it does for tar."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for data in (b"old", b"newer"):
            for split in ("train", "val"):
                info = tarfile.TarInfo(f"{split}/x/1.jpg")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    source = open_source(f"folder:{tmp_path / 'a.tar'}", "train")
    assert len(source) == 1
    assert source._sizes.tolist() == [5]


def test_sparse_member(tmp_path):
    """A member of 2^62 bytes with holes takes no space in the archive, and is refused."""
    path = tmp_path / "sparse.tar"
    block = bytearray(header("a.jpg", 512, b"S"))
    block[386:398], block[398:410] = f"{0:011o}\0".encode(), f"{512:011o}\0".encode()
    block[483:495] = b"\x80" + (1 << 62).to_bytes(11)
    block[148:156] = b"        "
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    path.write_bytes(bytes(block) + bytes(512) + bytes(1024))
    refused(lambda: list(tar_members(path)), "sparse.tar", "holes")


def test_damaged_gzip(tmp_path):
    """Damage anywhere in a .gz, also within the compressed data, is one sentence."""
    whole = gzip.compress(os.urandom(3000) + bytes(3000))
    for number, place in enumerate((0, 5, 12, 200, 1500, len(whole) - 3)):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        if place != 5:  # the time
            refused(lambda path=path: unpacked(path), path.name, "gzip")
    path.write_bytes(whole[: len(whole) // 2])
    refused(lambda: unpacked(path), "gzip")


def test_gzip_bomb(tmp_path, monkeypatch):
    """What unpacks to far more than its size is stopped on the way, and nothing is left."""
    from softmoe.data import files

    monkeypatch.setattr(files, "_UNPACKED_BYTES", 1 << 20)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(bytes(20 << 20)))
    refused(lambda: unpacked(path), "bomb.tar.gz", "200 times")
    assert list((tmp_path / "cache").iterdir()) == []


def shard(tmp_path: Path, write_tar, encoded, picture, **parts: bytes) -> str:
    files = {f"a.{kind}": data for kind, data in parts.items()} | {"a.jpg": encoded(picture(1))}
    write_tar(tmp_path / "train-0.tar", files)
    return f"wds:{tmp_path}/{{split}}-0.tar"


@pytest.mark.parametrize("label", ["30000000", "1" + "0" * 20, "9" * 4000, "-1", "1e9", "", "\ud83d\ude00"])
def test_labels_beyond_what_there_is(label, tmp_path, write_tar, encoded, picture):
    """One wrong label neither fills the memory nor hangs."""
    uri = shard(tmp_path, write_tar, encoded, picture, cls=label.encode("utf-8", "surrogatepass"))
    refused(lambda: open_source(uri, "train"), "label")


def test_many_classes_can_be_stated(tmp_path, write_tar, encoded, picture):
    """A few examples of many classes are fine if it is said how many there are, up to a limit."""
    uri = shard(tmp_path, write_tar, encoded, picture, cls=b"200000")
    refused(lambda: open_source(uri, "train"), "200000")
    assert len(open_source(f"{uri}?classes=200001", "train").classes) == 200001
    refused(lambda: open_source(f"{uri}?classes={MAX_CLASSES + 1}", "train"), "at most")


@pytest.mark.parametrize(
    ("facts", "captions"),
    [
        ({"caption": None}, ()),
        ({"caption": 5}, ()),
        ({"captions": ["a cat", None, 3]}, ("a cat",)),
        ({"captions": {"en": "a cat"}}, ()),
        ([1, 2], ()),
        ({"text": "a dog"}, ("a dog",)),
    ],
)
def test_captions_that_are_none(facts, captions, tmp_path, write_tar, encoded, picture):
    """null and numbers are no captions, and the image is read all the same."""
    uri = shard(tmp_path, write_tar, encoded, picture, cls=b"0", json=json.dumps(facts).encode())
    source = open_source(uri, "train")
    assert source.read(0).captions == captions
    assert source.read_captions([0]) == [captions]  # pyright: ignore[reportAttributeAccessIssue]


def test_deep_json(tmp_path, write_tar, encoded, picture):
    """Nesting beyond the interpreter's depth is a sentence wherever JSON is read."""
    deep = b'{"a":' * 100_000
    refused(lambda: parse_json(deep, "x"), "x is not valid JSON: it is nested too deeply")
    refused(lambda: open_source(shard(tmp_path, write_tar, encoded, picture, json=deep), "train"), "nested")
    source = open_source(shard(tmp_path, write_tar, encoded, picture, cls=b"0", json=deep), "train")
    with pytest.raises(BrokenImage, match="json part"):
        source.read(0)
    assert source.read_captions([0]) == [()]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("text", ["5", "null", '"x"', "[" * 100_000, "{", b"\xff\xfe\xfa"])
@pytest.mark.parametrize("scheme", ["folder", "wds"])
def test_damaged_class_names(text, scheme, tmp_path, folder, write_tar, encoded, picture):
    """A classes.json that is no object is named."""
    uri = shard(tmp_path, write_tar, encoded, picture, cls=b"0") if scheme == "wds" else f"folder:{folder}"
    file = (tmp_path if scheme == "wds" else folder) / "classes.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(lambda: open_source(uri, "train"), "classes.json")


def test_class_names_that_are_not_utf8(tmp_path, encoded, picture, write_tar):
    """They are refused when the data is opened, not when the trained model is saved."""
    for split in ("train", "val"):
        name = os.fsencode(tmp_path / "set" / split) + b"/caf\xe9"
        os.makedirs(name)
        Path(os.fsdecode(name), "a.png").write_bytes(encoded(picture(1), "PNG"))
    refused(lambda: open_source(f"folder:{tmp_path}/set", "train"), "not UTF-8", "caf")
    tar = write_tar(tmp_path / "x.tar", {"train/caf\udce9/a.png": encoded(picture(1), "PNG")})
    refused(lambda: open_source(f"folder:{tar}", "train"), "not UTF-8")
    good = write_tar(
        tmp_path / "y.tar", {"train/a/a.png": encoded(picture(1), "PNG"), "classes.json": b'{"a": "\\ud800"}'}
    )
    refused(lambda: open_source(f"folder:{good}", "train"), "not UTF-8")


def test_patterns_of_too_many_names():
    """Braces that stand for billions of names are refused before they are written out."""
    for pattern in ("{0..99999999999}.tar", "{000..999}{000..999}{0..9}.tar", "{" + "a," * 20 + "b}{0..999999}.tar"):
        refused(lambda pattern=pattern: open_source(f"wds:{pattern}", "train"), "names")


@pytest.mark.parametrize(
    "head",
    [
        struct.pack(">I4i", 0x804, 1 << 30, 1 << 30, 1 << 30, 1 << 30),
        struct.pack(">I3i", 0x803, -1, 28, 28),
        struct.pack(">I3i", 0x803, 1, 0, 28),
        b"\0\0\x08\xff" + b"\0\0\0\1" * 255,
        struct.pack(">Ii", 0x803, 1),
        b"\0\0\x08\x00",
    ],
)
def test_idx_headers(head, tmp_path):
    """Sizes that overflow, vanish or are negative are refused."""
    (tmp_path / "train-images-idx3-ubyte").write_bytes(head + bytes(1000))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">Ii", 0x801, 1) + b"\0")
    refused(lambda: open_source(f"idx:{tmp_path}", "train"), "idx")


def test_augmentation_without_end():
    """RandAugment has a largest number of layers."""
    refused(lambda: TransformConfig(rand_layers=10**20), "100 layers")


def test_text_parts_are_small(tmp_path, write_tar, encoded, picture):
    """A caption of 20 MB is no caption."""
    refused(lambda: open_source(shard(tmp_path, write_tar, encoded, picture, txt=bytes(20_000_000)), "train"), "txt")


def test_a_tar_within_memory(tmp_path):
    """Members of a good archive are found where they are."""
    path, out = tmp_path / "good.tar", io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in ("a" * 150, "b"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    path.write_bytes(out.getvalue())
    found = list(tar_members(path))
    assert [name for name, _, _ in found] == ["a" * 150, "b"]
    assert all(out.getvalue()[offset : offset + size] == b"abc" for _, offset, size in found)


def test_links_that_lead_in_circles(tmp_path, encoded, picture):
    """Links back to a folder above, and thirty folders that each link to the next twice, end; every image counts once.
    A link to itself is no folder."""
    top = tmp_path / "set" / "train" / "a"
    top.mkdir(parents=True)
    (top / "0.jpg").write_bytes(encoded(picture(8, 8), "JPEG"))
    for name in ("x", "y"):
        (top / name).symlink_to(".")
    (top / "itself").symlink_to("itself")
    for level in range(30):
        (tmp_path / f"{level}").mkdir()
        for name in ("l", "r"):
            (tmp_path / f"{level}" / name).symlink_to(tmp_path / f"{level + 1}")
    (tmp_path / "30").mkdir()
    (tmp_path / "30" / "deep.jpg").write_bytes(encoded(picture(8, 8), "JPEG"))
    (top / "many").symlink_to(tmp_path / "0")
    source = open_source(f"folder:{tmp_path}/set", "train")
    assert [source.read(i).name.rsplit("/", 1)[-1] for i in range(len(source))] == ["0.jpg", "deep.jpg"]


def test_folders_within_folders(tmp_path, encoded, picture):
    """Folders within folders are walked without a call for each: there may be more than Python allows calls."""
    deep = tmp_path.joinpath("set", "train", "a", *["b"] * 300)
    deep.mkdir(parents=True)
    (deep / "0.jpg").write_bytes(encoded(picture(8, 8), "JPEG"))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        assert len(open_source(f"folder:{tmp_path}/set", "train")) == 1
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("titles", ['{"a": {"x": 1}}', '{"a": null}', '{"a": "x", "a": "y"}', '{"a": "\\u001b[2J"}'])
def test_class_names_that_are_none(titles, tmp_path, encoded, picture):
    """A classes.json must give names: no tables, nothing twice, nothing that moves a terminal's cursor."""
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "0.jpg").write_bytes(encoded(picture(8, 8), "JPEG"))
    (tmp_path / "classes.json").write_text(titles)
    refused(lambda: open_source(f"folder:{tmp_path}", "train"), "classes.json")


@pytest.mark.parametrize(
    "titles",
    [
        "[null]",
        "[[]]",
        "[true]",
        '{"0": ["n01440764", "tench"]}',
        '{"x": "tench"}',
        '{"-1": "tench"}',
        '{"00": "tench"}',
        '{"1000000": "tench"}',
        '{"' + "9" * 5000 + '": "tench"}',
        "[" + "0," * 1_000_000 + "0]",
    ],
    ids=lambda titles: titles[:20],
)
def test_class_names_of_shards_that_are_none(titles, tmp_path, write_tar, encoded, picture):
    """The classes.json beside shards gives names by numbers, not more than there may be."""
    uri = shard(tmp_path, write_tar, encoded, picture, cls=b"0")
    (tmp_path / "classes.json").write_text(titles)
    refused(lambda: open_source(uri, "train"), "classes.json")


def test_class_names_of_shards(tmp_path, write_tar, encoded, picture):
    """Names by number; a class without one is called by its number."""
    uri = shard(tmp_path, write_tar, encoded, picture, cls=b"1")
    (tmp_path / "classes.json").write_text('{"0": "ant", "3": 7}')
    assert open_source(uri, "train").classes == ("ant", "1", "2", "7")


def test_texts_beside_images_are_bounded(tmp_path, encoded, picture):
    """Captions of a gigabyte are none, and a classes.json of a gigabyte is refused, in a folder and in a tar."""
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "0.jpg").write_bytes(encoded(picture(8, 8), "JPEG"))
    for name in ("train/a/0.txt", "classes.json"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 30)
    assert open_source(f"pairs:{tmp_path}", "train").read(0).captions == ()
    refused(lambda: open_source(f"folder:{tmp_path}", "train"), "classes.json", "are not read")
    tar = tmp_path / "x.tar"
    tar.write_bytes(header("train/a/0.jpg", 0) + header("classes.json", 1 << 30))
    os.truncate(tar, (1 << 30) + 4096)
    refused(lambda: open_source(f"folder:{tar}", "train"), "classes.json", "are the limit")


def test_names_of_broken_images_are_one_line(tmp_path):
    """The name of a file that cannot be read is shown without what would move the cursor."""
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "x\n\x1b[2J.jpg").write_bytes(b"no image")
    source = open_source(f"folder:{tmp_path}", "train")
    refused(lambda: source.read(0), "x\\n\\x1b[2J.jpg")


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_archives_that_are_pipes(ending, tmp_path):
    """A pipe with the name of a shard or of an idx file is not waited for."""
    for name in ("t.tar", "train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        os.mkfifo(tmp_path / f"{name}{ending}")
    for uri in (f"wds:{tmp_path}/*.tar{ending}", f"idx:{tmp_path}"):
        refused(lambda uri=uri: open_source(uri, "train"), "not a plain file")
