"""Checkpoints: atomic, checksummed, nothing pickled; written and read by one process or by many.

    checkpoints/step_00001000/
      model.safetensors, config.json     the model, as any saved model
      ema.safetensors                    the averaged weights, if the run keeps them
      optimizer.safetensors              moments, by parameter name
      state.json                         step, counters, data position, seed, the run's settings
      manifest.json                      step, and size and SHA-256 of the files above
    checkpoints/last, checkpoints/best   links to two of them

Many processes write a folder model/ with a file each instead of model.safetensors (see shards.py); either kind is read
by any number of processes. A checkpoint is written to a hidden folder, flushed to the disk and renamed: one that has
its name is whole. Random numbers and the order of the data are functions of (seed, step), so the step is all there is
to keep of them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.machine import local
from softmoe.storage.files import FileFacts, read_json, whole_folder, write_json
from softmoe.storage.weights import Spec, WeightFiles, check_finite, check_same, write_tensors

STEP_NAME = re.compile(r"step_(\d{8,12})")
_FILE = re.compile(r"[a-z]+\.json|[a-z]+\.safetensors|[a-z]+/[\w-]+\.safetensors")
_STATES = {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}  # of AdamW, of SGD and Muon
_SHA256 = re.compile(r"[0-9a-f]{64}")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one step, in memory. `tensors` and `texts` map file names (without ending) to contents."""

    step: int
    tensors: dict[str, Tensors]
    texts: dict[str, dict[str, Any]]
    ready: Callable[[], bool] | None = None
    """Waits until the copies from a GPU have arrived, and tells if the weights are finite; None if both is known. The
    writer calls it, so that training goes on meanwhile."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk whose files are as they were written; its tensors are read when they are asked for."""

    folder: Path
    step: int
    texts: dict[str, dict[str, Any]]
    specs: dict[str, dict[str, Spec]]
    """Names, types and shapes of all tensors."""

    @cached_property
    def tensors(self) -> dict[str, Tensors]:
        """Return all tensors, whole, in this process."""
        found = {
            n: {k: torch.empty(s.shape, dtype=s.dtype) for k, s in specs.items()} for n, specs in self.specs.items()
        }
        for name, tensors in found.items():
            fill(tensors_path(self.folder, name), tensors, alone=True)
        return found


class BrokenCheckpoint(ValueError):
    """A checkpoint whose files are missing, cut or changed."""


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def tensors_path(folder: Path, name: str) -> Path:
    """Find the tensors `name` of a checkpoint: a folder with the parts of many processes, or one file."""
    return folder / name if (folder / name).is_dir() else folder / f"{name}.safetensors"


def copy_tensors(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy tensors to main memory, where training will not change them.

    Copies from a GPU are not waited for; work that is given to the GPU afterwards comes after them.
    """
    return {name: _host_copy(tensor.detach()) for name, tensor in tensors.items()}


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True).contiguous()
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True, memory_format=torch.contiguous_format)
    local(copy).copy_(local(tensor), non_blocking=True)
    return copy


def write_checkpoint(folder: Path, snapshot: Snapshot, group: Any = None) -> Path:
    """Write one checkpoint under `folder`; on failure nothing is left of it. OSError where the disk refuses.

    With a process group all its ranks call this together, and each writes its own parts.
    """
    target = folder / step_name(snapshot.step)
    if group is not None:
        from softmoe.storage.shards import write_sharded  # slow to import

        write_sharded(target, snapshot.step, snapshot.tensors, snapshot.texts, group)
        return target
    with whole_folder(target) as partial:
        files = {
            f"{n}.safetensors": write_tensors(partial / f"{n}.safetensors", t) for n, t in snapshot.tensors.items()
        }
        write_texts(partial, snapshot.step, snapshot.texts, files)
    return target


def write_texts(folder: Path, step: int, texts: Mapping[str, Any], files: Mapping[str, FileFacts]) -> None:
    """Write the JSON files of a checkpoint, and last the manifest with the facts of them and of `files`."""
    facts = dict(files) | {f"{n}.json": FileFacts.of(write_json(folder / f"{n}.json", v)) for n, v in texts.items()}
    write_json(folder / "manifest.json", {"step": step, "files": {n: asdict(f) for n, f in sorted(facts.items())}})


def read_checkpoint(folder: Path, group: Any = None) -> Checkpoint:
    """Open and verify a checkpoint. BrokenCheckpoint, saying which file, if anything is not as it was written.

    With a process group all its ranks call this together; they share the checksums, and all raise if one does.
    """
    if group is None:
        return _read(folder, 0, 1)
    from softmoe.storage.shards import shared_read  # slow to import

    return shared_read(lambda rank, world: _read(folder, rank, world), group, BrokenCheckpoint)


def _read(folder: Path, rank: int, world: int) -> Checkpoint:
    try:
        step, files = read_manifest(folder)
        for name in sorted(files)[rank::world]:
            check_file(folder / name, files[name])
        names = [Path(name) for name in sorted(files)]
        check_parts(folder, names)
        texts = {name.stem: read_json(folder / name) for name in names if name.suffix == ".json"}
        check_texts(texts, step)
        sets = {name.parts[0].removesuffix(".safetensors") for name in names if name.suffix == ".safetensors"}
        return Checkpoint(
            folder, step, texts, {name: tensor_specs(tensors_path(folder, name)) for name in sorted(sets)}
        )
    except BrokenCheckpoint:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise BrokenCheckpoint(f"{folder} cannot be read: {error}") from error


def read_manifest(folder: Path) -> tuple[int, dict[str, FileFacts]]:
    """Read step and files of a checkpoint. ValueError for anything that a manifest never says."""
    path = folder / "manifest.json"
    values = read_json(path)
    if not isinstance(values, dict) or set(values) != {"step", "files"}:
        raise ValueError(f"{path} must have the two keys 'step' and 'files'")
    step, files = values["step"], values["files"]
    if type(step) is not int or step < 0:
        raise ValueError(f"{path} says step {step!r}, which is no number of steps")
    named = STEP_NAME.fullmatch(folder.resolve().name)
    if named and int(named[1]) != step:
        raise ValueError(f"{path} says step {step}, but its folder is of step {int(named[1])}")
    if not isinstance(files, dict) or not any(name.startswith(("model.safetensors", "model/")) for name in files):
        raise ValueError(f"{path} names no weights of a model")
    for name, facts in files.items():
        if not _FILE.fullmatch(name):  # also keeps us inside the folder
            raise ValueError(f"{path} names {name!r}, which is no file of a checkpoint")
        if (
            not isinstance(facts, dict)
            or set(facts) != {"bytes", "sha256"}
            or not _SHA256.fullmatch(str(facts["sha256"]))
        ):
            raise ValueError(f"{path} does not state size and SHA-256 of {name}")
    return step, {name: FileFacts(facts["bytes"], facts["sha256"]) for name, facts in files.items()}


def check_parts(folder: Path, names: list[Path]) -> None:
    """Raise ValueError for a file of parts that the manifest does not name: all that are there would be read."""
    for part in {name.parts[0] for name in names if len(name.parts) > 1}:
        found = {path.relative_to(folder) for path in (folder / part).iterdir()}
        if strangers := sorted(found - set(names)):
            raise ValueError(f"{folder / strangers[0]} is not named in the manifest")


def check_file(path: Path, expected: FileFacts) -> None:
    """Raise BrokenCheckpoint unless the file is there with the size and checksum that the manifest states."""
    if not path.is_file():
        raise BrokenCheckpoint(f"{path} is missing or no plain file")
    if path.stat().st_size != expected.bytes:
        raise BrokenCheckpoint(
            f"{path} does not match its manifest: it has {path.stat().st_size} bytes instead of {expected.bytes}"
        )
    if FileFacts.of(path) != expected:
        raise BrokenCheckpoint(f"{path} does not match its manifest: it has another checksum")


def check_texts(texts: Mapping[str, Any], step: int) -> None:
    """Raise ValueError unless all that state.json says of the step is the manifest's."""
    state = texts.get("state", {})
    progress, data = (state.get(part, {}) if isinstance(state, dict) else None for part in ("progress", "data"))
    if not isinstance(progress, dict) or not isinstance(data, dict):
        raise ValueError("state.json is not the state of a run")
    for where in (state, progress, {"step": data.get("next_step", step)}):
        if where.get("step", step) != step:
            raise ValueError(f"manifest.json says step {step}, but state.json says {where['step']!r}")


def tensor_specs(where: Path) -> dict[str, Spec]:
    """Read names, types and shapes of the tensors in a safetensors file or in a folder of parts."""
    if where.is_dir():
        from softmoe.storage.shards import part_specs

        return part_specs(where)
    with WeightFiles(where.parent, [where.name]) as weights:
        return {name: weights.spec(name) for name in weights.names}


def fill(where: Path, targets: Mapping[str, Tensor], group: Any = None, *, alone: bool = False) -> None:
    """Read `targets` in place from a safetensors file or a folder of parts; `alone` is one process without the others.

    ValueError, before anything is changed, unless the names, shapes and types are exactly those at `where`.
    """
    check_same(tensor_specs(where), {name: Spec.of(tensor) for name, tensor in targets.items()}, str(where))
    if where.is_dir() or (group is not None and not alone):
        from softmoe.storage.shards import read_parts

        read_parts(where, targets, group, alone=alone)
        return
    with WeightFiles(where.parent, [where.name]) as weights, torch.no_grad():
        for name, target in targets.items():
            tensor = weights.tensor(name)
            check_finite(name, tensor, where)
            target.copy_(tensor)


def restore(
    found: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: nn.Module | None = None,
    group: Any = None,
) -> None:
    """Load weights, averaged weights and optimizer state, each process its own parts.

    Everything is checked before anything is changed: ValueError if a name, shape or type differs from this run's.
    """
    targets: dict[str, Mapping[str, Tensor]] = {"model": model.state_dict()}
    if average is not None:
        targets["ema"] = average.state_dict()
    for name, tensors in targets.items():
        if name not in found.specs:
            raise ValueError(f"{found.folder} has no {name}.safetensors, which this run needs")
        ours = {key: Spec.of(t) for key, t in tensors.items()}
        check_same(found.specs[name], ours, str(tensors_path(found.folder, name)))
    moments = optimizer_targets(found.specs.get("optimizer", {}), optimizer)
    for name, tensors in (targets | {"optimizer": moments}).items():
        fill(tensors_path(found.folder, name), tensors, group)
    check_moments(moments, found)
    parameters = named_parameters(optimizer)
    for key, value in moments.items():
        name, _, part = key.rpartition("/")
        optimizer.state[parameters[name]][part] = value


def check_moments(moments: Tensors, found: Checkpoint) -> None:
    """Raise ValueError for moments that no run of so many steps has: too many updates, means of squares below zero."""
    for key, value in moments.items():
        part = local(value)
        if part.device.type != "cpu":
            continue  # reading it would wait; there, steps that are not finite are skipped and reported
        if key.endswith("/exp_avg_sq") and bool((part < 0).any()):
            raise ValueError(f"{found.folder} has a mean of squares below zero in {key}")
        if key.endswith("/step") and not (1 <= float(value) <= found.step and float(value).is_integer()):
            raise ValueError(f"{found.folder} is of step {found.step}, but {key} says {float(value):g} updates")


def named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the parameters that an optimizer updates, by the names it was given."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's state by parameter name: `encoder.norm.weight/exp_avg`, ...

    The parts are sorted: an optimizer that was loaded has them in another order, and its file must be the same.
    """
    return {
        f"{name}/{key}": value
        for name, parameter in named_parameters(optimizer).items()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if value is not None
    }


def optimizer_targets(found: Mapping[str, Spec], optimizer: torch.optim.Optimizer) -> Tensors:
    """Make empty state for `name/part` keys, to be filled from a checkpoint: where the parameter is, spread as it is.

    ValueError for state of a parameter that is not there, of another optimizer, incomplete, or of another shape or type
    than this optimizer's: compiled code is given the addresses of these tensors and the length of the parameter.
    """
    parameters = named_parameters(optimizer)
    sgd = isinstance(optimizer, torch.optim.SGD)
    muon = {name for group in optimizer.param_groups if group.get("muon") for name in group["names"]}
    parts: dict[str, set[str]] = {}
    targets = {}
    for key, spec in found.items():
        name, _, part = key.rpartition("/")
        if name not in parameters:
            raise ValueError(f"the checkpoint has optimizer state of {name!r}, which this run does not train")
        if part not in _STATES[sgd or name in muon]:
            raise ValueError(f"the checkpoint has {key}, which {type(optimizer).__name__} does not know")
        parts.setdefault(name, set()).add(part)
        parameter = parameters[name]
        if part == "step":
            known = (torch.float32, torch.get_default_dtype())
            expected = Spec(spec.dtype if spec.dtype in known else torch.float32, ())
            targets[key] = torch.zeros((), device=parameter.device, dtype=expected.dtype)
        else:
            dtype = getattr(optimizer, "state_dtype", None) or parameter.dtype
            expected = Spec(dtype, tuple(parameter.shape))
            targets[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if spec.shape != expected.shape:
            shapes = list(spec.shape), list(expected.shape)
            raise ValueError(f"{key} is {shapes[0]} in the checkpoint and {shapes[1]} in this run")
        if spec.dtype != expected.dtype:
            raise ValueError(f"{key} is {spec.dtype} in the checkpoint and {expected.dtype} in this run")
    if parameters and not parts and not sgd:  # which may have none
        raise ValueError(f"the checkpoint has no optimizer state, which {type(optimizer).__name__} needs after a step")
    for name, has in parts.items():
        if missing := _STATES[sgd or name in muon] - has:
            raise ValueError(f"the checkpoint has no {name}/{min(missing)}, which {type(optimizer).__name__} needs")
    return targets
