"""Texts to numbers: the same for both packages, whatever the text is."""

import json
import pickle

import pytest
import torch

from softmoe.data import Tokenizer, open_source, some_captions, train_tokenizer
from softmoe.data.texts import normal_text

KINDS = (".json", ".model")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> Tokenizer:
    return train_tokenizer(some_captions(open_source("shapes", "train"), 200), 400, request.param)


def test_end_token(tokenizer):
    """Short texts are filled up with it, long ones are cut before it: it is always last. It is number 1."""
    assert tokenizer.end == 1
    short, long = tokenizer.encode(["a red star", "a red star above a blue heart " * 10], 8)
    first = short.tolist().index(1)
    assert 0 < first < 7
    assert short[first:].tolist() == [1] * (8 - first)
    assert long.tolist().index(1) == 7
    assert tokenizer.decode(short.tolist()) == "a red star"


def test_lower_case(tokenizer):
    """Capital letters are the same text, unless they shall not be."""
    rows = tokenizer.encode(["A Red STAR", "a red star"], 12)
    assert torch.equal(rows[0], rows[1])
    keeping = Tokenizer(tokenizer.name, tokenizer.data, lower=False)
    assert not torch.equal(*keeping.encode(["A Red STAR", "a red star"], 12))
    assert keeping.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("text", ["", "   ", "\n", "\x00\x01", "\ufffd\ufffd"])
def test_a_text_that_says_nothing(tokenizer, text):
    """Only end tokens."""
    assert tokenizer.encode([text], 5).tolist() == [[1] * 5]


@pytest.mark.parametrize(
    "text", ["x" * 10_000, "star " * 2_000, "猫の写真", "صورة قطة", "🦊", "caf\udce9", "</s> <unk> <pad>", "<0x41>"]
)
def test_any_text_has_numbers(tokenizer, text):
    """10,000 characters, other scripts, broken bytes, words that look like special tokens: text like any other. The end
    token comes last only."""
    row = tokenizer.encode([text], 16)[0].tolist()
    first = row.index(1)
    assert first > 0
    assert set(row[first:]) == {1}
    assert all(0 <= number < tokenizer.size for number in row)


def test_other_scripts_survive(tokenizer):
    """What was never met is spelled in bytes and can be read back."""
    assert tokenizer.decode(tokenizer.encode(["猫 star"], 16)[0].tolist()) == "猫 star"


def test_training_is_reproducible(tokenizer):
    """The same captions give the same file."""
    captions = list(some_captions(open_source("shapes", "train"), 200))
    again = train_tokenizer(captions, 400, "." + tokenizer.name.split(".")[1])
    assert again.data == tokenizer.data
    assert again.fingerprint == tokenizer.fingerprint


def test_files_and_workers(tokenizer, tmp_path):
    """A file read back, and a copy in another process, do the same."""
    (tmp_path / tokenizer.name).write_bytes(tokenizer.data)
    expected = tokenizer.encode(["a blue ring"], 10)
    for copy in (Tokenizer.open(tmp_path / tokenizer.name), pickle.loads(pickle.dumps(tokenizer))):
        assert torch.equal(copy.encode(["a blue ring"], 10), expected)


def test_padding_in_a_file_is_ignored(tmp_path):
    """Files from elsewhere may pad, cut and add tokens by themselves: here the length is the model's."""
    made = train_tokenizer(["a red star"] * 9, 300)
    values = json.loads(made.data)
    values["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    changed = Tokenizer("t.json", json.dumps(values).encode())
    assert torch.equal(changed.encode(["a red star"], 10), made.encode(["a red star"], 10))


def test_no_texts(tokenizer):
    """An empty batch is an empty batch."""
    assert tokenizer.encode([], 7).shape == (0, 7)


def test_normal_text():
    """Control characters and broken bytes become single spaces."""
    assert normal_text(" a\x00b \ufffd c\n\td ") == "a b c d"


def test_mistakes(tmp_path):
    """Each has its sentence."""
    for name, data, words in (
        ("tokenizer.txt", b"", "ends in .json .*or .model"),
        ("tokenizer.json", b"{}", "not a tokenizer file of the package tokenizers"),
        ("tokenizer.json", b"\xff", "not a tokenizer file"),
        ("tokenizer.model", b"nonsense", "not a SentencePiece file|no end token"),
    ):
        with pytest.raises(ValueError, match=words):
            Tokenizer(name, data)
    values = json.loads(train_tokenizer(["a b"], 300).data)
    values["added_tokens"] = []
    values["model"]["vocab"] = {key: n for key, n in values["model"]["vocab"].items() if key != "</s>"}
    with pytest.raises(ValueError, match="has no end token"):
        Tokenizer("t.json", json.dumps(values).encode())
    values = json.loads(train_tokenizer(["a b"], 300).data)
    values["model"] |= {"continuing_subword_prefix": "#" * 60, "merges": [["a", "b"]]}  # at this the package panics
    with pytest.raises(ValueError, match="not a tokenizer file"):
        Tokenizer("t.json", json.dumps(values).encode())
    values = json.loads(train_tokenizer(["a b"], 300).data)
    values["model"]["vocab"]["a"] = 297_000  # no row of a text tower would have that number
    with pytest.raises(ValueError, match="the token number 297000, but"):
        Tokenizer("t.json", json.dumps(values).encode())
    with pytest.raises(ValueError, match="there is no tokenizer file"):
        Tokenizer.open(tmp_path / "t.json")
    with pytest.raises(ValueError, match="at least 300 tokens"):
        train_tokenizer(["a"], 100)
    with pytest.raises(ValueError, match="no captions to learn tokens from"):
        train_tokenizer(["", " "], 300)
    with pytest.raises(ValueError, match=r"ends in .json or .model"):
        train_tokenizer(["a"], 300, ".txt")
    with pytest.raises(ValueError, match="length of texts must be at least 1"):
        train_tokenizer(["a"], 300).encode(["a"], 0)


@pytest.mark.parametrize("name", ["tokenizers", "sentencepiece"])
def test_missing_package(name, monkeypatch):
    """Says which extra to install."""
    import sys

    made = train_tokenizer(["a red star above a blue heart"] * 9, 300, {"tokenizers": ".json"}.get(name, ".model"))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"package {name}: pip install 'softmoe-vit\[text\]'"):
        Tokenizer(made.name, made.data)
