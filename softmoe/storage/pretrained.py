"""Save a model as a folder and load it again, on any machine, without trusting the file."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softmoe import __version__
from softmoe.machine import choose_device
from softmoe.models.config import TwoTowerConfig
from softmoe.models.two_tower import TwoTower
from softmoe.models.vit import VisionTransformer
from softmoe.storage.adapters import inherited, open_base
from softmoe.storage.architecture import Architecture, parse_architecture, split_architecture
from softmoe.storage.files import (
    check_names,
    check_path,
    first_line,
    parse_json,
    read_json,
    whole_folder,
    write_bytes,
    write_json,
    write_text,
)
from softmoe.storage.hub import model_card
from softmoe.storage.preprocessing import Preprocessing, parse_preprocessing
from softmoe.storage.saved import TOKENIZER_FILES, SavedModel, TokenizerFile, is_saved
from softmoe.storage.settings import flatten
from softmoe.storage.weights import (
    INDEX,
    SHARD_BYTES,
    Spec,
    WeightFiles,
    check_files,
    check_finite,
    count_dtypes,
    write_weights,
)

_KNOWN_FILES = ("config.json", "README.md", INDEX, "eval.json", "fewshot.json", *TOKENIZER_FILES)
_BLOCK = re.compile(r"(image\.|text\.|)encoder\.blocks\.(\d+)\.")
Model = VisionTransformer | TwoTower


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    classes: Iterable[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    tokenizer: TokenizerFile | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> SavedModel:
    """Write model.safetensors (or shards), config.json and README.md into `folder`, all or nothing.

    `preprocessing` is how evaluation images are made (None: the model's size, central crop); `provenance` is
    whatever should be known of how the model was made: run, step, data fingerprint, results. Two towers need their
    `tokenizer`. A folder that holds a saved model is replaced; one that holds anything else is refused.
    """
    plain = unwrap(model)
    state = plain.state_dict()
    return save_tensors(
        plain.config,
        {name: Spec.of(tensor) for name, tensor in state.items()},
        state.__getitem__,
        folder,
        preprocessing=preprocessing,
        classes=classes,
        provenance=provenance,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
    )


def save_tensors(
    architecture: Architecture,
    specs: Mapping[str, Spec],
    get: Callable[[str], Tensor],
    folder: str | Path,
    *,
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    classes: Iterable[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    tokenizer: TokenizerFile | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    rest: Collection[str] = (),
) -> SavedModel:
    """Save weights that come one by one, as `save_pretrained` does: `get(name)` is called once for each of `specs`.

    So a model larger than the memory can be written, if its tensors can be made in turn. `rest` are names that may be
    missing, because a base has them.
    """
    target = check_path(Path(folder).expanduser())
    refuse_other_files(target)
    config, towers = split_architecture(architecture)
    tokenizer = tokenizer and TokenizerFile(tokenizer.name, tokenizer.data, tokenizer.lower)  # or softmoe.data's
    if (tokenizer is None) != (towers is None):
        raise ValueError(
            "two towers are saved with their tokenizer, and a model for images alone has none: give tokenizer= for two "
            "towers (softmoe.data.Tokenizer.open(FILE)) and leave it out for one"
        )
    try:
        parse_architecture(json.loads(json.dumps(architecture.to_dict())))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{target} was not written, as it could not be opened again: {error}") from error
    with torch.device("meta"):
        check_specs(construct(architecture), specs, f"{target} was not written", rest)
    if isinstance(preprocessing, Mapping):
        preprocessing = parse_preprocessing(preprocessing)
    names = None if classes is None else check_names(map(str, classes), target)
    if names is not None and len(names) != config.num_classes:
        raise ValueError(f"{len(names)} class names were given, but the model has {config.num_classes or 'no'} outputs")
    made = {"softmoe": __version__, "date": datetime.now(UTC).isoformat(timespec="seconds")}

    def get_finite(name: str) -> Tensor:
        tensor = get(name)
        check_finite(name, tensor.detach(), f"{target} was not written")
        return tensor

    with whole_folder(target) as partial:
        metadata = {"format": "pt", "architecture": json.dumps(architecture.to_dict())}
        files = write_weights(partial, specs, get_finite, metadata=metadata, max_shard_bytes=max_shard_bytes)
        saved = SavedModel(
            target,
            config,
            preprocessing or Preprocessing(config.image_shape),
            names,
            files,
            count_dtypes(specs.values()),
            dict(provenance or {}) | made,
            towers,
            tokenizer,
        )
        parameters = sum(torch.Size(spec.shape).numel() for spec in specs.values())
        write_json(partial / "config.json", saved.to_dict())
        write_text(partial / "README.md", model_card(saved, parameters))
        if tokenizer is not None:
            write_bytes(partial / tokenizer.name, tokenizer.data)
    return saved


def load_saved(
    saved: SavedModel, device: str | torch.device = "cpu", *, dtype: torch.dtype | None = None, verify: bool = True
) -> VisionTransformer:
    """Load the model that was opened, of two towers the image tower. ValueError if the files and config.json differ.

    On the CPU the weights are mapped from the file, not copied, until they are written to. Nothing is built before
    config.json and the files' headers agree. A mapped file must stay as it is while the model is used: one that is cut
    or overwritten in place ends the process (SIGBUS); `save_pretrained` never does that, it puts a new file in the old
    one's place. `load_state_dict` of clones makes a model independent of it.
    """
    model = load_whole(saved, device, dtype=dtype, verify=verify)
    return model.image if isinstance(model, TwoTower) else model


def load_two_tower(
    saved: SavedModel, device: str | torch.device = "cpu", *, dtype: torch.dtype | None = None, verify: bool = True
) -> TwoTower:
    """Load both towers."""
    if saved.towers is None:
        how = f"softmoe train lit_small --image {saved.folder} --data pairs:DATA learns texts for it"
        raise ValueError(f"{saved.folder} is a model for images alone; {how}")
    model = load_whole(saved, device, dtype=dtype, verify=verify)
    assert isinstance(model, TwoTower)
    return model


def load_whole(saved: SavedModel, device: str | torch.device, *, dtype: torch.dtype | None, verify: bool) -> Model:
    """Load all of a saved model: one tower or both."""
    place = choose_device(str(device))
    check_files(saved.folder, saved.files, hashes=verify)
    base = open_base(saved)
    with open_weights(saved) as weights:
        if base is None:
            check_depth(saved.architecture, weights.names, f"the weights in {saved.folder} do not fit its config.json")
        model = build_empty(saved)
        rest: Mapping[str, Tensor] = {}
        if base is not None:
            assert isinstance(model, VisionTransformer)
            rest = inherited(model, load_saved(base, device, dtype=dtype, verify=verify))
        specs = check_weights(saved, model, weights, rest)
        dtypes = {spec.dtype for spec in specs.values()}
        fill_buffers(model, place, dtype or (dtypes.pop() if len(dtypes) == 1 else None))

        def place_tensor(name: str) -> Tensor:
            if name not in specs:
                return rest[name]
            if place.type == "meta":
                return torch.empty(specs[name].shape, dtype=dtype or specs[name].dtype, device="meta")
            tensor = weights.tensor(name)
            if verify:
                check_finite(name, tensor, saved.folder / weights.file_of[name])
            return tensor.to(device=place, dtype=dtype or specs[name].dtype)

        model.load_state_dict({name: place_tensor(name) for name in model.state_dict()}, assign=True)
    return model.eval()


def open_weights(saved: SavedModel) -> WeightFiles:
    """Open the tensors of a saved model; those of a checkpoint of many processes are joined when they are read."""
    if not saved.in_parts:
        return WeightFiles(saved.folder, saved.files)
    from softmoe.storage.shards import PartFiles  # slow to import

    return PartFiles(saved.folder / Path(next(iter(saved.files))).parent)


def construct(architecture: Architecture) -> Model:
    """Build a model with fresh weights."""
    return TwoTower(architecture) if isinstance(architecture, TwoTowerConfig) else VisionTransformer(architecture)


def build_empty(saved: SavedModel) -> Model:
    """Build the model on the meta device: shapes without memory."""
    try:
        with torch.device("meta"):
            return construct(saved.architecture)
    except (ValueError, TypeError, RuntimeError, KeyError, ArithmeticError) as error:
        raise ValueError(f"{saved.folder / 'config.json'} does not describe a model: {first_line(error)}") from error


def check_weights(saved: SavedModel, model: nn.Module, weights: WeightFiles, rest: Collection[str]) -> dict[str, Spec]:
    """Return types and shapes of the tensors. ValueError unless index, config.json and weight files agree on them.

    `model` is on the meta device, so no memory is used yet.
    """
    folder = saved.folder
    if len(saved.files) > 1 and not saved.in_parts:
        index = read_json(folder / INDEX)
        if not isinstance(index, dict) or index.get("weight_map") != weights.file_of:
            raise ValueError(f"{folder / INDEX} does not match the tensors in the weight files")
    noted = parse_json(weights.metadata.get("architecture", "null"), folder / next(iter(saved.files)))
    stated, written = (
        flatten(json.loads(json.dumps(architecture.to_dict())))
        for architecture in (saved.architecture, saved.architecture if noted is None else parse_architecture(noted))
    )
    for key in stated.keys() & written.keys():
        if stated[key] != written[key]:
            raise ValueError(
                f"{folder / 'config.json'} is not the one these weights were saved with: it says {key} = "
                f"{stated[key]!r}, the weights say {written[key]!r}"
            )
    specs = {name: weights.spec(name) for name in weights.names}
    check_specs(model, specs, f"the weights in {folder} do not fit its config.json", rest)
    counts = count_dtypes(specs.values())
    if saved.dtypes is not None and counts != saved.dtypes:
        raise ValueError(f"the weights in {folder} are of the types {counts}, but config.json says {saved.dtypes}")
    return specs


def check_depth(architecture: Architecture, names: Iterable[str], failed: str) -> None:
    """Raise a ValueError unless there are as many blocks as config.json says: each takes time to build."""
    towers = (
        {"image.": architecture.image, "text.": architecture.text}
        if isinstance(architecture, TwoTowerConfig)
        else {"": architecture}
    )
    for prefix, config in towers.items():
        found = {match[2] for name in names if (match := _BLOCK.match(name)) and match[1] == prefix}
        if len(found) != config.depth:
            raise ValueError(f"{failed}: the model needs {config.depth} blocks, but there are {len(found)} in the file")


def check_specs(model: nn.Module, specs: Mapping[str, Spec], failed: str, rest: Collection[str] = ()) -> None:
    """Raise a ValueError unless names and shapes are exactly the model's, all floating-point; `rest` may be missing."""
    wanted = model.state_dict()
    missing, extra = sorted(wanted.keys() - specs.keys() - set(rest)), sorted(specs.keys() - wanted.keys())
    if missing or extra:
        what = "is missing" if missing else "is not part of the model"
        count = len(missing or extra)
        raise ValueError(f"{failed}: {(missing or extra)[0]} {what}" + (f" ({count} such)" if count > 1 else ""))
    for name, tensor in ((name, tensor) for name, tensor in wanted.items() if name in specs):
        if specs[name].shape != tuple(tensor.shape):
            raise ValueError(f"{failed}: {name} is {specs[name].shape}, but the model needs {tuple(tensor.shape)}")
        if not specs[name].dtype.is_floating_point:
            raise ValueError(f"{failed}: {name} is of type {specs[name].dtype}, but weights are floating-point numbers")


def fill_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Compute the buffers that are not stored (the table of sincos positions), on `device`."""
    stored = model.state_dict().keys()
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_buffers(path, recurse=False) if name not in stored]
        for name in names:
            key = name.rpartition(".")[2]
            setattr(module, key, torch.empty_like(getattr(module, key), device=device))
        if names:
            module.reset_parameters()  # pyright: ignore[reportCallIssue]  # every module with such a buffer has it
            for name in names:
                key = name.rpartition(".")[2]
                setattr(module, key, getattr(module, key).to(dtype))


def unwrap(model: nn.Module) -> Model:
    """Find the plain model under torch.compile or data parallelism."""
    plain = model
    while not isinstance(plain, VisionTransformer | TwoTower):
        inner = getattr(plain, "_orig_mod", None) or getattr(plain, "module", None)
        if inner is None:
            more = "; join adapters with the model first: merge_and_unload()" if hasattr(plain, "peft_config") else ""
            raise ValueError(f"only our ViTs and two towers can be saved, not a {type(plain).__name__}{more}")
        plain = inner
    for name, tensor in plain.state_dict().items():
        if tensor.is_meta:
            raise ValueError("a model on the meta device has no weights to save")
        if type(tensor).__module__.split(".")[0] != "torch":
            raise ValueError(f"{name} is a {type(tensor).__name__}: save a model before it is quantized, not after")
    return plain


def refuse_other_files(target: Path) -> None:
    """Raise a ValueError if writing to this folder would replace anything but a saved model."""
    if not target.name:
        raise ValueError(f"{target} is not the name of a folder")
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file; give the name of a folder")
    inside = sorted(p.name for p in target.iterdir())
    if not inside:
        return
    if not is_saved(target):
        raise ValueError(f"{target} exists and is not a saved model (it holds {inside[0]}); give another folder")
    strangers = [name for name in inside if name not in _KNOWN_FILES and not name.endswith(".safetensors")]
    if strangers:
        raise ValueError(f"{target} holds a saved model but also {strangers[0]}, which would be lost; move it away")
