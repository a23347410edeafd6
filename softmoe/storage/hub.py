"""Saved models on the Hugging Face Hub. Needs the extra `hub`; everything else works without it."""

import re
from pathlib import Path
from typing import Any

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_WANTED = ["config.json", "README.md", "*.safetensors", "*.safetensors.index.json", "tokenizer.*"]  # never a pickle


def is_id(text: str) -> bool:
    """Whether this may be the id of a model on the Hub: user/name."""
    return _ID.fullmatch(text) is not None


def download(name: str, revision: str | None = None) -> Path:
    """The folder of a model on the Hub, fetched once and kept in huggingface_hub's cache."""
    api = _api(f"there is no folder {name}, and to look for it on the Hub")
    try:
        return Path(api.snapshot_download(name, revision=revision, allow_patterns=_WANTED))
    except Exception as error:  # each version of the library and of its transport has errors of its own
        raise ValueError(
            f"there is no folder {name}, and the model could not be fetched from the Hub: {_line(error)}"
        ) from error


def upload(folder: str | Path, name: str, *, private: bool = False) -> str:
    """Put a saved model on the Hub under `user/name`; returns its address."""
    from softmoe.storage.saved import is_saved

    if not is_saved(Path(folder)):
        raise ValueError(f"{folder} is not a saved model; write one with softmoe.save_pretrained")
    if not is_id(name):
        raise ValueError(f"the name of a model on the Hub looks like user/name, not {name!r}")
    api = _api("to put a model on the Hub")
    try:
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=str(folder), allow_patterns=_WANTED))
    except Exception as error:
        raise ValueError(f"the model could not be put on the Hub as {name}: {_line(error)}") from error


def _api(purpose: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(f"{purpose}, huggingface_hub is needed: pip install 'softmoe[hub]'") from error
    return huggingface_hub


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
