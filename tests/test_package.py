"""The package as people get it: a wheel and a source archive, tried from a folder that holds nothing else."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import softmoe

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PARTS = ("py.typed", "inspection/page.html", "evaluate/confusions.svg", "report/page.html", "accelerate/cpp")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="building needs hatchling: pip install 'softmoe-vit[dev]'"
)


def build(kind: str, folder: Path) -> Path:
    """Build as pip does, from the project's folder."""
    code = f"import sys, hatchling.build as b; print(b.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path):
    """Unpacked into an empty folder, it is what is imported; the layer computes, and the command answers."""
    assert wheel.name.startswith("softmoe_vit-")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    names = {path.relative_to(tmp_path / "softmoe").as_posix() for path in (tmp_path / "softmoe").rglob("*")}
    assert set(PARTS) <= names
    assert not any("test" in Path(name).name for name in names if name.endswith(".py") and "/" not in name)
    code = """
import softmoe, torch
print(softmoe.__file__)
assert softmoe.SoftMoE(8, 2)(torch.zeros(1, 3, 8)).shape == (1, 3, 8)
from softmoe.cli import main
main(["--version"])
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(tmp_path / "softmoe" / "__init__.py"),
        f"softmoe {softmoe.__version__}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_by_pip(kind: str, tmp_path: Path):
    """In an environment of its own the command is there, and the model inside the package answers."""
    place = tmp_path / "env"
    venv.create(place, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    (packages / "ours.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(place / "bin" / words[0]), *words[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    options = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--disable-pip-version-check")
    run("python", "-m", "pip", "install", *options, str(build(kind, tmp_path)))
    home = run("python", "-c", "import softmoe; print(softmoe.__file__)").strip()
    assert home == str(packages / "softmoe" / "__init__.py")
    assert run("softmoe", "--version") == f"softmoe {softmoe.__version__}\n"
    assert "3 of 3 right, of 288 classes" in run("softmoe", "demo", "--pictures", "3")
    assert (tmp_path / "softmoe_demo" / "inspect.html").is_file()


def test_what_the_index_is_told(wheel: Path):
    """Name, version, command and typing are in the wheel, and the version is that of the citation."""
    with zipfile.ZipFile(wheel) as archive:
        facts = {name.rsplit("/", 1)[-1]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata, scripts = (archive.read(facts[name]).decode() for name in ("METADATA", "entry_points.txt"))
    assert "Name: softmoe-vit\n" in metadata
    assert f"Version: {softmoe.__version__}\n" in metadata
    assert "Classifier: Typing :: Typed" in metadata
    assert "softmoe = softmoe.cli:main" in scripts
    assert f"version: {softmoe.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_the_page_on_the_index(wheel: Path):
    """Its README has the words of ours, and no picture or link that leads to a file that is not there."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = archive.read(name).decode()
    assert "## The layer in your model" in page
    assert "https://arxiv.org/abs/2308.00951" in page
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert links
    assert all(link.startswith("https://") for link in links)


def test_the_source_archive_is_whole(tmp_path: Path):
    """It has the package, the tests, the license and what builds it."""
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "softmoe/moe/soft.py", "tests/oracle.py"} <= names
    assert not any(name.startswith((".venv", "runs/")) for name in names)


def test_the_name_is_free_by_the_rule_of_the_index():
    """The index takes names for equal that differ only in separators and case: ours is not `soft-moe` or a peer's."""
    plain = SETTINGS["name"].lower().replace("-", "").replace("_", "").replace(".", "")
    assert plain not in {"softmoe", "softmoepytorch", "softmixtureofexperts"}
