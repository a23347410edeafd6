"""One run is one python file: a docstring with command, time and measured result, and `recipe()`.

    softmoe train quickstart                 a recipe of this folder
    softmoe train path/to/mine.py            a file of the user's own, of the same form

A recipe that leaves `run_name` alone gets its own name as the name of its run.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import pkgutil
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from softmoe.train import TrainConfig

Result = TypeVar("Result")


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def about(name: str) -> str:
    """Return the first sentence of a recipe's docstring, which is read and not run."""
    text = Path(__path__[0], f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0]


def load(name: str, variant: str = "recipe") -> TrainConfig:
    """Return the settings of a recipe, by its name or its file; a run without a name gets that of the recipe.

    The variant "tiny", for tests, is the function `tiny` of the file or, without one, the recipe `shrunk`.
    """
    module = find(name)

    from softmoe.train import TrainConfig

    own: Callable[[], TrainConfig] | None = getattr(module, variant, None)
    function = own or (getattr(module, "recipe", None) if variant == "tiny" else None)
    if function is None:
        raise ValueError(f"the recipe {name} has no function {variant}() -> TrainConfig")
    config = _called(function, name)
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{variant}() of the recipe {name} must return a TrainConfig, got {type(config).__name__}")
    config = _called(lambda: TrainConfig.from_dict(config.to_dict()), name)  # as it is stored: tuples, not lists
    config = shrunk(config) if own is None else config
    return replace(config, run_name=Path(name).stem) if config.run_name == TrainConfig.run_name else config


def find(name: str) -> ModuleType:
    if name.endswith(".py"):
        return from_file(Path(name))
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no recipe {name!r}{hint or '.'} Recipes: {', '.join(names())}, or the path of a .py file")
    return importlib.import_module(f"{__name__}.{name}")


def from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no recipe file {path}")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module, execute = importlib.util.module_from_spec(spec), spec.loader.exec_module
    _called(lambda: execute(module), str(path))
    return module


def _called(function: Callable[[], Result], name: str) -> Result:
    """Call the user's code. Its errors become a ValueError that names the line."""
    try:
        return function()
    except SyntaxError as error:
        raise ValueError(f"the recipe {name} is not Python, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
        place = f" in line {lines[-1]}" if lines else ""
        said = (str(error).splitlines() or [""])[0]
        raise ValueError(f"the recipe {name} fails{place}: {type(error).__name__}: {said}") from error


def shrunk(config: TrainConfig, image_size: int = 32, data: str = "shapes?size=32") -> TrainConfig:
    """Shrink a recipe to two steps of a tiny model on other data; everything else stays as it is."""
    from softmoe.train import EvaluationSection

    d = config.data
    blocks = None if config.model.blocks is None else (0, 1)
    shape = replace(config.model, width=16, depth=2, heads=2, mlp_dim=32, patch_size=image_size // 4, blocks=blocks)
    text = replace(config.text, width=16, depth=2, heads=2, mlp_dim=32, vocab_size=512)
    return replace(
        config,
        steps=2,
        model=replace(shape, num_experts=None if shape.name.startswith("vit_") else 4),
        text=text,
        data=replace(d, train=data, batch_size=8, workers=0, transform=replace(d.transform, image_size=image_size)),
        schedule=replace(config.schedule, warmup=1, cooldown=min(1, config.schedule.cooldown)),
        evaluation=EvaluationSection(every=None, examples=16),
        log=replace(config.log, every=1),
    )
