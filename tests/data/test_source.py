"""The strings that name a source."""

from pathlib import Path

import pytest

from softmoe.data import Source, open_source
from softmoe.data.source import fingerprint, parse_uri


def test_parse():
    """Scheme, path and options come apart."""
    assert parse_uri("wds:/a/{0..3}.tar?classes=5&order=shards") == (
        "wds",
        "/a/{0..3}.tar",
        {"classes": "5", "order": "shards"},
    )
    assert parse_uri("shapes?size=48") == ("shapes", "", {"size": "48"})


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("shape", "Did you mean 'shapes'"),
        ("folders:/x", "Did you mean 'folder'"),
        ("folder:", "folder:PATH"),
        ("shapes:/x", "no path"),
        ("shapes?siz=32", "Did you mean 'size'"),
        ("shapes?size", "size=VALUE"),
        ("shapes?size=big", "positive whole number"),
        ("shapes?size=4", "8 to 512"),
        ("shapes?classes=some", "upstream, downstream, all"),
        ("shapes?seed=-1", "whole number"),
        ("folder:/no/such", "does not exist"),
        ("idx:/no/such", "does not exist"),
        ("wds:/no/{split}-{0..1}.tar", "/no/train-0.tar"),
    ],
)
def test_mistakes(uri: str, words: str):
    """A wrong string is a ValueError that says what to write."""
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        open_source(uri, "train")


@pytest.mark.parametrize("uri", ["photo", "./photo", "photo?val=0.2"])
def test_mistyped_folder(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder that is not there is said to be none, and the one beside it that is nearest is named."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"[Tt]here is no folder .*\.$"):
        open_source(uri, "train")
    (tmp_path / "photos").mkdir()
    with pytest.raises(ValueError, match=r"[Tt]here is no folder .* Did you mean 'photos'\?"):
        open_source(uri, "train")


def test_contract():
    """A source is what the protocol says."""
    assert isinstance(open_source("shapes", "train"), Source)


def test_fingerprint_separates_parts():
    """Parts do not run into each other."""
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint([1, 2]) == fingerprint([1, 2]) != fingerprint([12])


@pytest.mark.parametrize(("scheme", "package", "extra"), [("digits", "sklearn", "digits"), ("hf:x", "datasets", "hf")])
def test_missing_extra_is_named(scheme: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch):
    """Without the optional package the error says which extra to install."""
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setitem(__import__("sys").modules, f"{package}.datasets", None)
    with pytest.raises(ValueError, match=rf"pip install 'softmoe-vit\[{extra}\]'"):
        open_source(scheme, "train")
