"""The shape of the house: who may import whom, and what `import softmoe` costs."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import softmoe

ROOT = Path(softmoe.__file__).parent
WRITER = "storage.files"  # how files are written: it imports the standard library alone
SETTINGS = "storage.settings"  # and so does this
LOADER = "lazy"  # how names are loaded when first used, for the lists of names alone
BUILDER = "accelerate.build"  # how C++ is built and loaded: it needs nothing of the rooms
SHARED = {"accelerate.guards", "accelerate.torch_private"}
MIDDLE = {"models", "moe", "storage", "machine", "paths", BUILDER, "__version__"} | SHARED
UPPER = MIDDLE | {"accelerate", "budget", "parallel", "inference", "convert", "data"}
TOP = UPPER | {"train", "transfer", "evaluate", "inspection"}
ALL = TOP | {"studies", "recipes", "bench", "report", "cli"}
MAY_IMPORT: dict[str, set[str]] = {
    **{name: set[str]() for name in (LOADER, "machine", "paths", WRITER, SETTINGS)},
    "moe": set(),
    "models": {"moe"},
    BUILDER: {"machine", "paths", WRITER},
    "storage.preprocessing": {SETTINGS},
    "data": {"machine", "paths", BUILDER, WRITER, "storage.preprocessing"},
    "storage": {"moe", "models", "machine", "paths", "__version__"},
    **dict.fromkeys(("accelerate", "budget", "convert"), MIDDLE),
    "inference": MIDDLE | {"accelerate"},  # what prepare does not replace is accelerated
    "parallel": MIDDLE | {"budget.plan"},  # it makes the layouts that are planned there
    **dict.fromkeys(("train", "evaluate"), UPPER),
    **dict.fromkeys(("transfer", "inspection"), UPPER | {"train", "evaluate"}),  # runs, and models as evaluated
    **dict.fromkeys(("studies", "recipes", "bench", "report", "cli", "timm", "api"), ALL),
    **dict.fromkeys(("__init__", "__main__"), ALL | {"api"}),
}
OPTIONAL = (
    "tokenizers",
    "sentencepiece",
    "matplotlib",
    "simplejpeg",
    "datasets",
    "sklearn",
    "tensorboard",
    "wandb",
    "pandas",
    "torchvision",
    "timm",
    "triton",
)


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    """moe for softmoe/moe/soft.py; the file's own name for softmoe/machine.py."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def modules_named(tree: ast.AST) -> set[str]:
    """Every module a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours_named(path: Path) -> set[str]:
    """Everything of this package that a file imports, without the package's own name: moe.soft.SoftRouter, machine."""
    names = modules_named(ast.parse(path.read_text()))
    assert "softmoe" not in names, f"{path} imports the whole package, so nobody sees which room it needs"
    return {name.removeprefix("softmoe.") for name in names if name.startswith("softmoe.")}


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    """A room imports only rooms and top-level modules below it: the layer knows nothing of models, models nothing of
    training."""
    module = str(path.relative_to(ROOT).with_suffix("")).replace(os.sep, ".")
    here = module if module in MAY_IMPORT else room(path)
    assert here in MAY_IMPORT, f"{here} is not a room of the design"
    allowed = MAY_IMPORT[here] | ({here} if here == room(path) else set())
    allowed |= {LOADER} if path.name == "__init__.py" else set()
    above = {name for name in ours_named(path) if not any(within(name, room) for room in allowed)}
    assert not above, f"{module} imports {sorted(above)}"


@pytest.mark.parametrize("name", ["moe", "models", "data", "budget", "convert"])
def test_lower_rooms_do_not_go_through_the_front(name):
    """`from softmoe import ...` reaches every room: below the top only the version may come that way."""
    for path in (ROOT / name).rglob("*.py"):
        front = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module == "softmoe"
            for alias in node.names
        }
        assert front <= {"__version__"}, path


@pytest.mark.parametrize("name", ["moe", "models"])
def test_layer_and_models_are_plain_torch(name):
    """The layer and the models import torch, each other, and of the standard library nothing that reaches the machine:
    no foreign code, threads, processes or files."""
    machine = {"ctypes", "threading", "multiprocessing", "concurrent", "subprocess", "os", "platform", "pathlib"}
    for path in (ROOT / name).rglob("*.py"):
        for module in modules_named(ast.parse(path.read_text())):
            top = module.split(".")[0]
            assert top in ("torch", "softmoe") or top in sys.stdlib_module_names - machine, f"{path}: {module}"


def run(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_import_is_light():
    """`import softmoe` loads neither torch nor any optional package; neither does the help of the command line."""
    heavy = ("torch", "numpy", "PIL", "safetensors", "tyro", "jinja2", *OPTIONAL)
    for code in ("import softmoe", "from softmoe.cli import main; main(['--help'])"):
        loaded = run(f"import sys; {code}; print('loaded', [name for name in {heavy} if name in sys.modules])")
        assert loaded.splitlines()[-1] == "loaded []", code


def test_settings_need_no_torch():
    """All recipes, the settings of runs and the configs of models, routers and transforms load, and are checked,
    without torch."""
    code = """
import sys
from softmoe import data, models, moe, recipes, storage, train
for room in (data, models, moe, storage, train):
    for name in room.__all__:
        if name.endswith(("Config", "Section")):
            getattr(room, name)
for name in recipes.names():
    recipes.load(name).check()
print("torch" in sys.modules)
"""
    assert run(code) == "False\n"


def test_models_load_no_optional_package():
    """The layer and the models work with the core dependencies alone."""
    code = "from softmoe.moe import *; from softmoe.models import *"  # all their names
    loaded = run(f"import sys; {code}; print([name for name in {OPTIONAL} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_public_names_resolve():
    """Everything named in __all__ is there, listed by dir(), and an unknown name is an AttributeError."""
    for name in softmoe.__all__:
        assert getattr(softmoe, name) is not None
        assert name in dir(softmoe)
    with pytest.raises(AttributeError, match="no attribute 'softmax'"):
        _ = softmoe.softmax
    assert softmoe.__version__.count(".") == 2


def test_every_room_is_reached_from_the_front():
    """`import softmoe` is enough for softmoe.train, softmoe.parallel and every other folder, each loaded when named."""
    rooms = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    assert {"moe", "models", "train", "parallel", "storage", "recipes", "cli"} <= set(rooms)
    assert set(rooms) <= set(dir(softmoe))
    code = "; ".join(f"softmoe.{room}.__name__" for room in rooms)
    assert run(f"import softmoe; {code}; print('reached')") == "reached\n"


@pytest.mark.parametrize("name", ["moe", "models"])
def test_rooms_export_what_they_list(name):
    """A room's __all__ is sorted and real."""
    module = getattr(softmoe, name)
    assert list(module.__all__) == sorted(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public)


@pytest.mark.parametrize("name", ["softmoe", *(f"softmoe.{path.parent.name}" for path in ROOT.glob("*/__init__.py"))])
def test_every_name_that_a_room_offers_is_there(name: str):
    """Also where names are loaded when first used: a moved file must be known by its new place, and dir() has all."""
    offered = import_module(name)
    for each in getattr(offered, "__all__", ()):
        getattr(offered, each)
        assert each in dir(offered)
