"""Small saved models and ways to damage them, for the tests of saving and loading."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import softmoe
from softmoe.models import VisionTransformer, create_model
from softmoe.storage.files import sha256

TINY = {"image_size": 32, "num_classes": 5, "width": 32, "heads": 2, "mlp_dim": 48, "depth": 2}
NAMES = ("cat", "dog", "eel", "fox", "gnu")


def tiny(name: str = "soft_ti8_4e", **changes) -> VisionTransformer:
    model = create_model(name, **(TINY | changes))
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def edit(folder: Path, change) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def restate(folder: Path) -> None:
    """Make config.json state the hashes of the files as they are: what a careful forger would do."""

    def change(values):
        for name, facts in values["weights"]["files"].items():
            facts |= {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}

    edit(folder, change)


def killed(*lines: str) -> None:
    """Run lines of Python in another process that ends itself, as if it was killed."""
    code = "\n".join(["import os, shutil", "from pathlib import Path", "from softmoe.storage import files", *lines])
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9


def killed_between_renames(folder: Path) -> None:
    """Replace the folder by an empty one in a process that ends when neither of them has the name."""
    killed(
        "rename = os.rename",
        "os.rename = lambda old, new: os._exit(9) if files.PARTIAL in str(old) else rename(old, new)",
        f"with files.whole_folder(Path({str(folder)!r})): pass",
    )
    assert not folder.exists()


def refused(folder: Path | str, *words: str, **options) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        softmoe.from_pretrained(folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
