"""Read a saved model's config.json strictly, and find the folder that a MODEL argument means.

    FOLDER/config.json             format, kind, architecture, preprocessing, classes, provenance, weights
    FOLDER/model.safetensors       or model-00001-of-0000N.safetensors with model.safetensors.index.json
    FOLDER/tokenizer.json          or tokenizer.model, of two towers: texts -> token numbers
    FOLDER/README.md               the model card

A training checkpoint (runs/NAME/checkpoints/step_...) is read as well; its facts are in manifest.json and state.json.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from softmoe.models import TwoTowerConfig, ViTConfig
from softmoe.moe import RouterConfig
from softmoe.storage import hub
from softmoe.storage.architecture import Architecture, parse_architecture, split_architecture
from softmoe.storage.checkpoint import check_file, check_parts, read_manifest
from softmoe.storage.files import FileFacts, check_names, follow_link, read_bytes, read_json
from softmoe.storage.preprocessing import Preprocessing, parse_preprocessing
from softmoe.storage.settings import check_keys
from softmoe.storage.weights import parse_dtypes, parse_files

FORMAT = "softmoe"
FORMAT_VERSION = 2  # 1 had the experts' w2 as (N, H, D)
_KEYS = ("format", "format_version", "kind", "architecture", "preprocessing", "classes", "provenance", "weights")
_KINDS = {"vit": _KEYS, "two_tower": (*_KEYS, "tokenizer")}
DEMO = Path(__file__).parents[1] / "demo"  # the model that comes inside the package, by the recipe of that name
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class TokenizerFile:
    """The file of the tokenizer that belongs to a text tower; softmoe.data.Tokenizer reads it."""

    name: str
    """tokenizer.json (of the package tokenizers) or tokenizer.model (SentencePiece)"""
    data: bytes = field(repr=False)
    lower: bool = True
    """Texts are put in lower case first."""

    @property
    def facts(self) -> FileFacts:
        return FileFacts(len(self.data), hashlib.sha256(self.data).hexdigest())


@dataclass(frozen=True)
class SavedModel:
    """A saved model as its config.json describes it, without the weights."""

    folder: Path
    config: ViTConfig
    """The image tower's, where there are two."""
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None
    files: dict[str, FileFacts]
    dtypes: dict[str, int] | None = None
    """Number of tensors of each type; None if it was not noted."""
    provenance: dict[str, Any] = field(default_factory=dict)
    towers: TwoTowerConfig | None = None
    """Both, if the model has two."""
    tokenizer: TokenizerFile | None = None

    @property
    def architecture(self) -> Architecture:
        return self.towers or self.config

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        t = self.tokenizer
        tokenizer = t and {"file": t.name, "lower": t.lower, **asdict(t.facts)}
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": "two_tower" if self.towers else "vit",
            "architecture": self.architecture.to_dict(),
            "preprocessing": asdict(self.preprocessing),
            "classes": None if self.classes is None else list(self.classes),
            "provenance": self.provenance,
            "weights": {"dtypes": self.dtypes, "files": {name: asdict(facts) for name, facts in self.files.items()}},
            **({"tokenizer": tokenizer} if self.towers else {}),
        }

    @property
    def fingerprint(self) -> str:
        """Return a hash of architecture and weights: equal for equal models, wherever they lie."""
        facts = {"architecture": without_defaults(self.architecture), "files": self.hashes()}
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()

    @property
    def in_parts(self) -> bool:
        """Tell whether the weights are parts of tensors, as many processes write them (see shards.py)."""
        return any("/" in name for name in self.files)

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of each weight file."""
        return {name: facts.sha256 for name, facts in self.files.items()}


def without_defaults(config: Any) -> dict[str, Any]:
    """Return the settings of a config and of those in it that are not defaults, and the names of routers.

    What is left out here is left out of a fingerprint: one that adapters were saved with still holds when a later
    softmoe adds settings, whose defaults are what models did before.
    """
    found: dict[str, Any] = {"name": config.name} if isinstance(config, RouterConfig) else {}
    for f in fields(config):
        value = getattr(config, f.name)
        if value != f.default:
            found[f.name] = without_defaults(value) if is_dataclass(value) else value
    return found


def open_saved(where: str | Path) -> SavedModel:
    """Open the saved model at `where`: its folder, a run's folder, a checkpoint, or a Hub id (user/name).

    Of a run: its exported model/ if there is one, else the best checkpoint, else the last. `demo`, where no folder
    of that name holds a model, is the small one that comes inside the package.
    """
    path = hub.model_path(where)
    if str(where) == "demo" and not hub.holds_model(path):
        return read_saved(DEMO)
    if path.is_file():
        how = "softmoe finetune and upcycle make one of others' weights, softmoe.from_pretrained opens them"
        raise ValueError(f"{path} is a file; give the folder of a saved model ({how})")
    if why := hub.why_no_model(where):
        raise ValueError(why)
    if not path.is_dir():
        return read_saved(hub.download(str(where)))
    for folder in (path, path / "model"):
        if is_saved(folder):
            return read_saved(folder)
    for folder in (path, *(follow_link(path / "checkpoints" / name) for name in ("best", "last"))):
        if (folder / "manifest.json").is_file():
            return read_checkpoint_model(folder)
    if (path / "config.json").is_file():
        read_json(path / "config.json")  # damaged, it is a ValueError that says where
    raise ValueError(hub.not_saved(path))


def is_saved(folder: Path) -> bool:
    """Tell whether the folder has a config.json that says it is one of ours."""
    try:
        values = read_json(folder / "config.json")
    except ValueError:
        return False
    return isinstance(values, dict) and values.get("format") == FORMAT


def read_saved(folder: Path) -> SavedModel:
    """Read config.json. ValueError for an unknown or missing key and for a value that is not valid."""
    path = folder / "config.json"
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f'{path} is not that of a saved model: it lacks "format": "{FORMAT}"')
    if (version := values.get("format_version")) != FORMAT_VERSION:
        what = f"format version {version!r:.100}, but this softmoe reads version {FORMAT_VERSION}"
        raise ValueError(f"{path} has {what}; update softmoe, or save the model again")
    try:
        if (kind := values.get("kind")) not in _KINDS:
            raise ValueError(f"the kind of model is {kind!r}, expected 'vit' or 'two_tower'")
        keys = _KINDS[kind]
        check_keys(values, keys, "")
        if missing := [key for key in keys if key not in values]:
            raise ValueError(f"{missing[0]!r} is missing")
        architecture = parse_architecture(values["architecture"])
        image, towers = split_architecture(architecture)
        if (towers is None) != (kind == "vit"):
            raise ValueError(f"the architecture is not that of the kind {kind!r}")
        weights = values["weights"]
        check_keys(weights, ("dtypes", "files"), "weights.")
        check_keys(values["provenance"], values["provenance"], "provenance.")
        return SavedModel(
            folder,
            image,
            parse_preprocessing(values["preprocessing"], complete=True),
            parse_classes(values["classes"], image.num_classes),
            parse_files(weights["files"]),
            parse_dtypes(weights["dtypes"]),
            values["provenance"],
            towers,
            None if towers is None else read_tokenizer(folder, values["tokenizer"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not describe a model: {error!s:.500}") from error


def read_checkpoint_model(folder: Path) -> SavedModel:
    """Read a training checkpoint as a saved model: the averaged weights, which are evaluated, if the run keeps them."""
    try:
        step, files = read_manifest(folder)
        for text in ("config.json", "state.json"):
            check_file(folder / text, files[text])
        check_parts(folder, [Path(name) for name in files])
        state = read_json(folder / "state.json")
        run, classes = state["config"], state.get("classes") or []
        image, towers = split_architecture(parse_architecture(read_json(folder / "config.json")))
        return SavedModel(
            folder,
            image,
            Preprocessing.of(SimpleNamespace(**run["data"]["transform"])),
            parse_classes(classes, image.num_classes) if len(classes) == image.num_classes else None,
            weights_called("ema", files) or weights_called("model", files),
            provenance={
                "run": run["run_name"],
                "step": step,
                "recipe_data": run["data"]["train"],
                "loss": run.get("objective", {}).get("loss"),
            },
            towers=towers,
            tokenizer=towers and tokenizer_of_run(folder.resolve().parent.parent, run["text"]["lower"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder} is not a readable checkpoint: {error!s:.500}") from error


def weights_called(name: str, files: Mapping[str, FileFacts]) -> dict[str, FileFacts]:
    """Return the weight files of this name in a checkpoint: one, or the parts of many processes."""
    return {
        file: facts for file, facts in files.items() if file == f"{name}.safetensors" or file.startswith(f"{name}/")
    }


def read_tokenizer(folder: Path, values: Mapping[str, Any]) -> TokenizerFile:
    """Read the tokenizer that config.json describes. ValueError if the file is another."""
    check_keys(values, ("file", "lower", "bytes", "sha256"), "tokenizer.")
    name = values["file"]
    if name not in TOKENIZER_FILES:  # also keeps us inside the folder
        raise ValueError(f"{name!r} is not the name of a tokenizer")
    if type(values["lower"]) is not bool:
        raise ValueError(f"tokenizer.lower must be true or false, got {values['lower']!r}")
    try:
        found = TokenizerFile(name, read_bytes(folder / name), values["lower"])
    except ValueError as error:
        raise ValueError(f"the tokenizer {name} cannot be read: {error}") from error
    if found.facts != FileFacts(values["bytes"], values["sha256"]):
        raise ValueError(f"the tokenizer {name} is not the one the model was saved with")
    return found


def tokenizer_of_run(run: Path, lower: bool) -> TokenizerFile:
    """Read the tokenizer that a training run keeps in its folder."""
    for name in TOKENIZER_FILES:
        if (run / name).is_file():
            return TokenizerFile(name, read_bytes(run / name), lower)
    raise ValueError(f"the run {run} has lost its tokenizer ({' or '.join(TOKENIZER_FILES)})")


def parse_classes(values: list[str] | None, outputs: int | None) -> tuple[str, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
        raise ValueError("classes must be a list of names, or null")
    if len(values) != outputs:
        raise ValueError(f"it names {len(values)} classes, but the model has {outputs or 'no'} outputs")
    return check_names(values, "this model")
