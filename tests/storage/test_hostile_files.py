"""Files beside the weights that a stranger made: bounded in size, never waited for, and never quietly another's."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from saved_models import NAMES, edit, refused, restate, tiny

import softmoe
from softmoe.data import Tokenizer
from softmoe.storage import Snapshot, files, open_saved, write_checkpoint
from softmoe.storage.checkpoint import copy_tensors
from softmoe.storage.files import MAX_JSON_BYTES, printable, read_bytes, read_json
from softmoe.storage.settings import check_keys
from softmoe.storage.weights import HEADER_BYTES, WeightFiles
from softmoe.train.folder import RunFolder
from softmoe.train.log import scan_metrics

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def saved(tmp_path) -> Path:
    softmoe.save_pretrained(tiny(), tmp_path / "m", classes=NAMES)
    return tmp_path / "m"


@pytest.mark.parametrize(("file", "key"), [("config.json", "norm_eps"), ("state.json", "step")])
def test_a_checkpoint_whose_settings_were_changed(file, key, tmp_path):
    """A checkpoint is opened as a model only if its settings are those that were saved, as its weights must be."""
    model = tiny()
    transform = {"image_size": 32, "crop": "central", "central_ratio": 1.1, "antialias": True}
    state = {"step": 2, "config": {"run_name": "run", "data": {"train": "shapes", "transform": transform}}}
    texts = {"config": model.config.to_dict(), "state": state}
    folder = write_checkpoint(tmp_path, Snapshot(2, {"model": copy_tensors(model.state_dict())}, texts))
    softmoe.from_pretrained(folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | {key: 1}))
    refused(folder, file, "does not match its manifest")


def test_headers_are_bounded(saved):
    """A header of a safetensors file that would fill the memory is not read, though its size and hash are as stated."""
    path = saved / "model.safetensors"
    with path.open("r+b") as file:
        file.write((HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, HEADER_BYTES + 100)
    restate(saved)
    refused(saved, f"its header has {HEADER_BYTES + 1:,} bytes")


def test_a_folder_whose_name_is_not_utf8(tmp_path):
    """Weights are not written, and no run is begun, where they could not be read again."""
    folder = tmp_path / os.fsdecode(b"\xffmodel")
    with pytest.raises(ValueError, match=r"cannot be kept in .*\\udcffmodel"):
        softmoe.save_pretrained(tiny(), folder)
    with pytest.raises(ValueError, match="not UTF-8"), RunFolder(folder).locked():
        pass
    assert not folder.exists()


def test_a_tensor_that_is_there_twice(saved):
    """A header that gives two places for one tensor is refused, where safetensors would take the last."""
    path = saved / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(header)[:-1] + f', "head.bias": {json.dumps(header["head.bias"])}}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[8 + length :])
    restate(saved)
    refused(saved, "model.safetensors", "the key 'head.bias' is there twice")


class CountedWord(str):
    """A text that counts how often one is compared with another."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountedWord.compared += 1
        return str.__eq__(self, other)


def test_the_work_grows_with_the_keys_and_not_their_square(monkeypatch):
    """A table of a million names, one of them twice or unknown, is looked through once; long names are cut."""
    monkeypatch.setattr(CountedWord, "compared", 0)
    words = [CountedWord(f"k{i}") for i in range(2000)]
    check_keys(dict.fromkeys(words), words, "")
    with pytest.raises(ValueError, match="'k1999' is there twice"):
        files._unique([(word, 0) for word in (*words, words[-1])])
    assert CountedWord.compared < 100
    with pytest.raises(ValueError, match="unknown key 'kkk") as caught:
        check_keys({"k" * 1_000_000: 1}, ["kind"], "")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(format_version="x" * 1_000_000),
        lambda c: c["preprocessing"].update(crop="x" * 1_000_000),
        lambda c: c["architecture"]["moe"].update(router="x" * 1_000_000),
    ],
)
def test_long_values_are_cut(change, saved):
    """What is wrong with a config.json is said without repeating a megabyte of it."""
    edit(saved, change)
    with pytest.raises(ValueError, match="xxx") as caught:
        open_saved(saved)
    assert len(str(caught.value)) < 1000


def test_weights_that_are_a_pipe(tmp_path):
    """A pipe with the name of a weight file is not waited for."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not a plain file"):
        WeightFiles(tmp_path, ["model.safetensors"])


@pytest.mark.parametrize("size", [MAX_JSON_BYTES + 1, 1 << 40])
def test_texts_are_bounded(size, tmp_path):
    """JSON and tokenizer files are looked at before they are read: a few bytes on the disk may claim to be a
    terabyte."""
    path = tmp_path / "tokenizer.json"
    path.touch()
    os.truncate(path, size)
    with pytest.raises(ValueError, match=f"it has {size:,} bytes"):
        read_json(path)
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match="more than 64,000,000 are not read"):
        Tokenizer.open(path)


def test_pipes_and_devices_are_not_read(tmp_path):
    """A pipe would be waited for, and a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="not a plain file"):
            read_bytes(path)


@pytest.mark.parametrize("name", ["\x1b[2Jcat", "a\nb", "\x9b31m", "\ud800"])
def test_class_names_that_do_something(name, saved, tmp_path):
    """Names that would move the cursor or cannot be printed are refused, when a model is read and when it is saved."""
    edit(saved, lambda values: values.update(classes=[name, *NAMES[1:]]))
    refused(saved, "control characters", ascii(name))
    with pytest.raises(ValueError, match="control characters"):
        softmoe.save_pretrained(tiny(), tmp_path / "n", classes=[name, *NAMES[1:]])


def test_names_of_every_script_are_fine(tmp_path):
    """Letters, signs and pictures of any script are names."""
    names = ["猫", "é̀", "👩‍🚀", "a\u3000b", "<b>&'\""]
    softmoe.save_pretrained(tiny(), tmp_path / "n", classes=names)
    assert open_saved(tmp_path / "n").classes == tuple(names)
    assert [printable(name) for name in names] == names
    assert printable("a\nb\x1b") == "a\\nb\\x1b"


@pytest.mark.parametrize("where", ["~nosuchuser/x", "x" * 5000, "y/" * 3000, "\0"])
def test_a_base_that_cannot_be(where, saved):
    """Adapters whose base is no path end in one sentence of bounded length."""
    edit(saved, lambda values: values["provenance"].update(base={"where": where, "fingerprint": "0" * 24}))
    refused(saved, "holds adapters, and their base")
    with pytest.raises(ValueError, match=r"^.{,2000}$"):
        softmoe.from_pretrained(saved)


def test_a_home_that_is_not_there():
    """A path in the home of nobody is a folder that is not there."""
    refused("~nosuchuser/model", "there is no folder ~nosuchuser/model")


def test_metrics_are_read_line_by_line(tmp_path):
    """A metrics.jsonl that claims to have hundreds of megabytes is not held in memory; its whole lines are read."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    os.truncate(path, 300_000_000)
    with path.open("ab") as file:
        file.write(b'\n{"step": 3}\n')
    tracemalloc.start()
    rows, damaged = scan_metrics(path)
    assert ([row["step"] for row in rows], damaged) == ([1, 2, 3], 1)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()
