"""Save only those weights of a model that its base, another saved model, does not have; load both as one model.

    save_adapters(model, "adapters", base="models/vit")     a folder like any saved model's, but small
    from_pretrained("adapters")                             reads both; ValueError if the base has changed

The folder says in config.json (provenance.base) where the base lies and the fingerprint of its weights. A base that
moved is also looked for beside the folder, under its own name.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softmoe.models import VisionTransformer
from softmoe.models.embed import LearnedPositions
from softmoe.paths import home_path
from softmoe.storage import hub
from softmoe.storage.files import first_line
from softmoe.storage.saved import SavedModel, open_saved

_FINGERPRINT = re.compile(r"[0-9a-f]{24}")


def dense_name(name: str) -> str:
    """Return the name that a parameter of an MLP with experts beside it has in the dense model."""
    return name.replace(".mlp.mlp.", ".mlp.")


@torch.no_grad()
def inherited(model: VisionTransformer, base: VisionTransformer) -> dict[str, Tensor]:
    """Return the weights that `model` takes over from `base`, by its own names: all but the head that both have.

    Positions are resampled to the model's grid. `model` may be on the meta device. What it would drop is refused.
    """
    old, found = {name: value for name, value in base.state_dict().items() if not name.startswith("head.")}, {}
    dropped = set(old)
    for name in model.state_dict():
        theirs = name if name in old else dense_name(name)
        if theirs in old:
            found[name] = old[theirs]
            dropped.discard(theirs)
    if dropped:
        raise ValueError(f"the saved model has weights that this one lacks ({min(dropped)}): give it the same options")
    if isinstance(model.positions, LearnedPositions) and isinstance(base.positions, LearnedPositions):
        found["positions.table"] = base.positions(model.positions.grid)
    return found


def facts_of_base(where: str | Path) -> dict[str, str]:
    """Return the facts by which an adapter folder names its base: where it lies and its weights' fingerprint."""
    saved = open_saved(where)
    if "base" in saved.provenance:
        raise ValueError(f"{where} holds adapters itself: give its base, {saved.provenance['base']['where']}")
    name = str(where) if hub.is_id(str(where)) and not Path(where).exists() else str(home_path(where).resolve())
    return {"where": name, "fingerprint": saved.fingerprint}


def open_base(saved: SavedModel) -> SavedModel | None:
    """Open the base of a folder of adapters; None for any other saved model. ValueError if it is not the right one."""
    facts = saved.provenance.get("base")
    if facts is None:
        return None
    config = saved.folder / "config.json"
    if not isinstance(facts, dict) or not all(isinstance(facts.get(key), str) for key in ("where", "fingerprint")):
        raise ValueError(f"{config} does not tell where the base of these adapters is")
    if not _FINGERPRINT.fullmatch(facts["fingerprint"]):
        raise ValueError(f"{config} has no fingerprint of the base of these adapters")
    beside = saved.folder.resolve().parent / Path(facts["where"]).name
    try:
        where = beside if not Path(facts["where"]).is_dir() and beside.is_dir() else facts["where"]
        base = open_saved(where)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{saved.folder} holds adapters, and their base {facts['where'][:300]} cannot be read "
            f"({first_line(error)}); put it there, or beside them as {str(beside)[:300]}"
        ) from error
    if base.fingerprint != facts["fingerprint"] or "base" in base.provenance:
        raise ValueError(
            f"{saved.folder} holds adapters for another base: they were trained on weights of fingerprint "
            f"{facts['fingerprint']}, but {where} has {base.fingerprint}; get the base they were trained on"
        )
    own, theirs = (
        replace(c, moe=None, image_size=0, num_classes=None, head_blocks=()) for c in (saved.config, base.config)
    )
    if own != theirs or base.towers or saved.towers:
        raise ValueError(f"{config} describes another model than its base {where} with experts beside the MLPs")
    return base


def save_adapters(model: VisionTransformer, folder: str | Path, base: str | Path, **more: Any) -> SavedModel:
    """Write what of `model` is not in `base`, bit for bit. `more` are the options of `save_pretrained`."""
    from softmoe.storage.pretrained import load_saved, save_tensors
    from softmoe.storage.weights import Spec

    facts = facts_of_base(base)
    rest, state = inherited(model, load_saved(open_saved(base))), model.state_dict()
    own = {name: value for name, value in state.items() if name not in rest or not torch.equal(value, rest[name])}
    more["provenance"] = dict(more.get("provenance") or {}) | {"base": facts}
    specs = {name: Spec.of(value) for name, value in own.items()}
    return save_tensors(model.config, specs, own.__getitem__, folder, rest=rest.keys() - own.keys(), **more)
