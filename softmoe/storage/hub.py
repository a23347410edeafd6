"""Download and upload saved models on the Hugging Face Hub, and write their model card (README.md).

Only the Hub needs the extra `hub`; a card is made from config.json and nothing else. What cannot be a model is told by
its name alone: this file loads without torch.
"""

import difflib
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softmoe.models import model_config
from softmoe.moe import SoftConfig
from softmoe.paths import home_path
from softmoe.storage.files import bring_back, first_line, follow_link
from softmoe.storage.settings import flatten

if TYPE_CHECKING:  # it imports this module
    from softmoe.storage.saved import SavedModel

WEIGHTS = (".npz", ".safetensors")
_MAX_CLASSES = 20  # names listed on a card
_MARKS = ("config.json", "open_clip_config.json", "manifest.json", "model/config.json", "checkpoints")
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES = ["*config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.*"]  # never a pickle


def is_id(text: str) -> bool:
    """Tell if a text has the form of a model's id on the Hub: user/name."""
    return _ID.fullmatch(text) is not None


def others_there(path: Path) -> str:
    """Say which models and runs lie where a missing one was looked for (or in runs/), the likeliest first."""
    return models_in(path.parent if path.parent != Path() else Path("runs"), path.name)


def models_in(place: Path, wanted: str = "") -> str:
    """Say which models and runs lie in a folder, the one whose name is likest first; nothing if there are none."""
    if not place.is_dir():
        return ""
    names = sorted(p.name for p in place.iterdir() if (p / "config.json").is_file())
    near = difflib.get_close_matches(wanted, names, n=1)
    shown = ", ".join([*near, *(name for name in names if name not in near)][:8])
    return f"{place} has {shown}{' and more' if len(names) > 8 else ''}" if names else ""


def holds_model(path: Path) -> bool:
    """Tell by names if this is a file of weights or the folder of a model (ours or others'), run or checkpoint."""
    if path.is_file():
        return path.suffix in WEIGHTS
    return any((path / name).exists() for name in _MARKS)


def model_path(where: str | Path) -> Path:
    """Return the path at which a model is looked for, brought back if a process was killed while it replaced it."""
    path = home_path(where)
    for folder in (path, path / "model"):
        bring_back(folder)
    return follow_link(path)


def why_no_model(where: str | Path) -> str | None:
    """Say why nothing that is called so can be a model; None if there may be one."""
    path = model_path(where)
    if str(where) == "demo" or path.is_file() or holds_model(path):
        return None
    if path.is_dir():
        inside = models_in(path)
        return not_saved(path) + (f"; {inside}" if inside else "")
    if "://" in str(where):
        return f"{where} is an address: download the files and give their folder, or give a Hub id such as user/name"
    if path.suffix in WEIGHTS:
        return f"there is no file {where}"
    others = others_there(path)
    if is_id(str(where)) and not others:
        return None
    if is_architecture(str(where)):
        how = f"softmoe train pretrain --model {where} --data DATA trains one"
        return f"{where} is an architecture and has no weights: {how}"
    return f"there is no folder {path}; {others or 'expected a saved model, a run, or a Hub id such as user/name'}"


def check_run(folder: Path) -> None:
    """Raise ValueError for a folder that is no run's, with the runs that are in it or, if there is none, beside it."""
    if not folder.exists():
        raise ValueError(f"there is no folder {folder}; {others_there(folder) or 'expected the folder of a run'}")
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            inside = models_in(folder)
            more = f"; {inside}" if inside else ""
            raise ValueError(f"{folder} is not the folder of a run: it has no {name}{more}")


def not_saved(folder: Path) -> str:
    return f"{folder} is not a saved model: it has no config.json written by softmoe.save_pretrained"


def is_architecture(name: str) -> bool:
    """Tell if models are made by this name, such as vit_s16."""
    try:
        model_config(name)
    except ValueError:
        return False
    return True


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model on the Hub, fetched once and kept in huggingface_hub's cache."""
    api = _api(f"there is no folder {name}, and to look for it on the Hub")
    try:
        return Path(api.snapshot_download(name, revision=revision, allow_patterns=[*_FILES, "README.md"]))
    except Exception as error:  # each version of the library and of its transport has errors of its own
        raise ValueError(
            f"there is no folder {name}, and the model could not be fetched from the Hub: {first_line(error)}"
        ) from error


def upload(
    folder: str | Path, name: str, *, private: bool = False, token: str | None = None, commit_message: str | None = None
) -> str:
    """Put a saved model on the Hub under `user/name` and return its address; `token` defaults to `hf auth login`'s."""
    from softmoe.storage.saved import is_saved, open_saved

    if not is_saved(Path(folder)):
        raise ValueError(f"{folder} is not a saved model; write one with softmoe.save_pretrained")
    if not is_id(name):
        raise ValueError(f"the name of a model on the Hub looks like user/name, not {name!r}")
    api, saved = _api("to put a model on the Hub"), open_saved(folder)
    to: dict[str, Any] = {"repo_id": name, "token": token}
    try:
        api.create_repo(**to, private=private, exist_ok=True)
        files = {"folder_path": str(folder), "allow_patterns": _FILES}
        address = str(api.upload_folder(**to, **files, commit_message=commit_message))
        if (saved.folder / "README.md").is_file():
            card = _card_for(saved, name).encode()
            api.upload_file(**to, path_or_fileobj=card, path_in_repo="README.md", commit_message=commit_message)
        return address
    except Exception as error:
        raise ValueError(f"the model could not be put on the Hub as {name}: {first_line(error)}") from error


def _card_for(saved: "SavedModel", name: str) -> str:
    """Return the folder's card, with the changes of its owner, under the name that the model has on the Hub."""
    text = (saved.folder / "README.md").read_text("utf-8")
    return text.replace(_usage(saved), _usage(saved, name)).replace(
        f"# {_title(saved)}\n", f"# {name.split('/')[-1]}\n", 1
    )


def push_to_hub(
    model: Any,
    name: str,
    *,
    private: bool = False,
    token: str | None = None,
    commit_message: str | None = None,
    **facts: Any,
) -> str:
    """Save a model with its card, put it on the Hub under `user/name` and return its address.

    `facts` are options of save_pretrained (classes, preprocessing, provenance). softmoe.from_pretrained(name) reads it.
    """
    from softmoe.storage.pretrained import save_pretrained

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / name.rsplit("/", 1)[-1]
        save_pretrained(model, place, **facts)
        return upload(place, name, private=private, token=token, commit_message=commit_message)


def _api(purpose: str) -> Any:
    """Import huggingface_hub, or say what it is needed for."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(f"{purpose}, huggingface_hub is needed: pip install 'softmoe-vit[hub]'") from error
    return huggingface_hub


def model_card(saved: "SavedModel", parameters: int) -> str:
    """Write the README.md of a saved model with so many parameters."""
    config, p = saved.config, saved.preprocessing
    kind = "a dense vision transformer"
    rows: dict[str, Any] = {
        "parameters": f"{parameters:,}",
        "image": f"{config.image_shape[0]} x {config.image_shape[1]} pixels, patches of {config.patch_size}",
        "transformer": f"{config.depth} blocks, width {config.width}, {config.heads} heads, MLP {config.mlp_dim}",
        "pooling, positions": f"{config.pool}, {config.positions}",
        "outputs": "features (no head)" if config.num_classes is None else f"{config.num_classes} classes",
    }
    if config.moe:
        kind = f"a vision transformer with {config.moe.router.name.replace('_', ' ')} mixtures of experts"
        router = config.moe.router
        each = router.slots_per_expert if isinstance(router, SoftConfig) else 0
        slots = f", {each} slot{'s' * (each > 1)} each" if each else ""
        blocks = ", ".join(map(str, config.moe_blocks))
        stay = "; the slots go on as the tokens" if config.moe.slots_stay else ""
        rows["experts"] = f"{config.moe.num_experts} ({router.name}{slots}) in blocks {blocks}{stay}"
    if saved.towers:
        t = saved.towers.text
        kind = f"two towers, for images and texts; that for images is {kind}"
        rows["text"] = (
            f"{t.depth} blocks, width {t.width}, {t.heads} heads, up to {t.length} of {t.vocab_size:,} tokens"
        )
        rows["outputs"] = (
            f"vectors of {saved.towers.embed_dim or config.head_width} numbers, for images and texts alike"
        )
    if saved.dtypes:
        rows["weights"] = ", ".join(f"{dtype} ({count} tensors)" for dtype, count in saved.dtypes.items())
    crop = {
        "central": f"shorter side to {p.central_ratio:.4g} times the size, middle cut out",
        "resize": "stretched to the size",
    }[p.crop]
    preprocessing = f"RGB, {crop}, {p.image_size[0]} x {p.image_size[1]} pixels, values from -1 (black) to 1 (white)."
    sections = [
        "---\nlibrary_name: softmoe\npipeline_tag: "
        + _task(saved)
        + "\ntags: [softmoe, vision-transformer, mixture-of-experts]"
        + _model_index(saved)
        + "\n---",
        f"# {_title(saved)}",
        f"This is {kind}, saved by softmoe.",
        _table(rows),
        "## Use",
        _usage(saved),
        f"Images: {preprocessing}",
        "## Where it comes from",
        _table(flatten(saved.provenance)),
    ]
    if saved.classes:
        shown = ", ".join(saved.classes[:_MAX_CLASSES])
        more = (
            f", and {len(saved.classes) - _MAX_CLASSES} more in config.json"
            if len(saved.classes) > _MAX_CLASSES
            else ""
        )
        sections += ["## Classes", f"{shown}{more}."]
    files = {name: f"{facts.bytes:,} bytes, SHA-256 `{facts.sha256}`" for name, facts in saved.files.items()}
    sections += ["## Files", _table(files)]
    return "\n\n".join(sections) + "\n"


def _title(saved: "SavedModel") -> str:
    """Name the model by its run, whose saved models are all called model, else by its folder."""
    return str(saved.provenance.get("run") or saved.folder.name)


def _task(saved: "SavedModel") -> str:
    """Name the model's task as the Hub does."""
    if saved.towers:
        return "zero-shot-image-classification"
    return "image-feature-extraction" if saved.config.num_classes is None else "image-classification"


def _model_index(saved: "SavedModel") -> str:
    """Write the evaluation results in the form that the Hub shows beside a model (JSON is YAML too)."""
    results, data = saved.provenance.get("results"), str(saved.provenance.get("recipe_data", "unknown"))
    if not isinstance(results, dict) or not results:
        return ""
    metrics = [
        {"type": "accuracy" if name.endswith("top1") else name.rsplit("/", 1)[-1], "name": name, "value": value}
        for name, value in results.items()
    ]
    result = {"task": {"type": _task(saved)}, "dataset": {"name": data, "type": data}, "metrics": metrics}
    return "\nmodel-index: " + json.dumps([{"name": _title(saved), "results": [result]}])


def _usage(saved: "SavedModel", name: str | None = None) -> str:
    """Write how to load and try the model under its name, by default its folder's."""
    name = name or saved.folder.name
    python = f'import softmoe\n\nmodel = softmoe.from_pretrained("{name}")'
    shell = f"softmoe predict {name} IMAGES..."
    if saved.towers:
        python = f'from softmoe.evaluate import load_towers\n\ntowers = load_towers("{name}")'
        shell = f'softmoe search {name} "a red car" FOLDER\nsoftmoe zeroshot {name} DATA'
    return f"```python\n{python}\n```\n\n```sh\n{shell}\n```"


def _table(rows: dict[str, Any]) -> str:
    cells = [(name, str(value).replace("|", "\\|").replace("\n", " ")) for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])
