"""The one writer: a file or a folder is the old one or the whole new one, and JSON is read strictly."""

import errno
import json
import os
import stat
import threading
from pathlib import Path

import pytest
import torch
from saved_models import tiny

import softmoe
from softmoe.storage import files
from softmoe.storage.checkpoint import Snapshot, write_checkpoint
from softmoe.storage.files import follow_link, point_link, read_json, whole_file, whole_folder, write_json, write_text


def test_a_file_is_the_old_one_or_the_whole_new_one(tmp_path: Path):
    """What fails in the middle changes nothing and leaves nothing beside; folders on the way are made."""
    path = write_text(tmp_path / "a" / "b.txt", "old")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_a_folder_is_the_old_one_or_the_whole_new_one(tmp_path: Path):
    """The new folder takes the old one's place with all it holds; a failure leaves the old one."""

    def fill(names: list[str], *, fail: bool = False) -> None:
        with whole_folder(tmp_path / "f") as partial:
            for name in names:
                write_text(partial / name, name)
            if fail:
                raise RuntimeError

    fill(["old"])
    with pytest.raises(RuntimeError):
        fill(["new"], fail=True)
    assert [p.name for p in (tmp_path / "f").iterdir()] == ["old"]
    fill(["new", "newer"])
    assert sorted(p.name for p in (tmp_path / "f").iterdir()) == ["new", "newer"]
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_links_and_pipes_stay(tmp_path: Path):
    """Writing through a link keeps the link; a pipe is written to and not replaced by a file."""
    write_text(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "words")
    reader.join(20)
    assert heard == ["words"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_folders_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    """A file system without that ability is tolerated wherever files, models and checkpoints are written."""
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    write_json(tmp_path / "a.json", 1)
    write_checkpoint(tmp_path, Snapshot(1, {"model": {"w": torch.ones(1)}}, {}))
    softmoe.save_pretrained(tiny(), tmp_path / "m")


def test_without_symbolic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where no link can be made a small file leads to the same folder, and is replaced like a link."""

    def refuse(self: Path, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    for name in ("step_00000001", "step_00000002"):
        (tmp_path / name).mkdir()
        point_link(tmp_path / "last", name)
        assert follow_link(tmp_path / "last") == tmp_path / name
    write_text(tmp_path / "last", "../..")
    assert follow_link(tmp_path / "last") == tmp_path / "last"


def test_modes_follow_the_umask(tmp_path: Path):
    """Checkpoints and models are as readable as any file the user makes: 0644 where the umask is 022."""
    before = os.umask(0o022)
    try:
        checkpoint = write_checkpoint(tmp_path, Snapshot(1, {"model": {"w": torch.ones(1)}}, {"state": {}}))
        softmoe.save_pretrained(tiny(), tmp_path / "m")
    finally:
        os.umask(before)
    found = {p.name: stat.S_IMODE(p.stat().st_mode) for f in (checkpoint, tmp_path / "m") for p in f.iterdir()}
    assert len(found) == 5
    assert set(found.values()) == {0o644}, found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ('{"b": {"a": 1, "a": 1}}', "the key 'a' is there twice"),
        ("1" * 5000, "not valid JSON"),
        ("\ud800", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, text: str, words: str):
    """Deep nesting, keys that are there twice, endless numbers and what is no text: one sentence."""
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=words) as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_json_that_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A pipe is not waited for, a folder and a missing file are named, and a huge file is not read."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a plain file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a plain file"):
        read_json(tmp_path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_json(tmp_path / "nothing")
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 10)
    write_json(tmp_path / "x.json", list(range(10)))
    with pytest.raises(ValueError, match="more than 10 are not read"):
        read_json(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == list(range(10))
