"""Damaged command lines, and the recipes and lists that they name."""

import contextlib
import io
import os
import random
from dataclasses import dataclass
from pathlib import Path

from fuzzing.cases import Case, Files, Set, Wrong, encoded, pictures
from fuzzing.models import model_seeds
from fuzzing.mutations import mutate_bytes, mutate_json, mutate_words
from fuzzing.runs import run_seeds
from PIL import Image

RECIPE = """from dataclasses import replace
from softmoe import recipes
from softmoe.train import TrainConfig

def recipe() -> TrainConfig:
    config = recipes.load("quickstart")
    return replace(config, steps=10, ema=0.9, threads=1, optim=replace(config.optim, eps=1e-8, head_decay=0.1))
"""


@dataclass
class LineSeeds:
    files: Files
    lines: list[list[str]]


def line_seeds(work: Path) -> LineSeeds:
    models = model_seeds(work)
    run = run_seeds(work).run
    files = {f"model/{n}": d for n, d in models["soft_ti8_4e"].items()}
    files |= {f"dense/{n}": d for n, d in models["vit_ti8"].items()}
    files |= {f"towers/{n}": d for n, d in models["towers"].items()} | {f"run/{n}": d for n, d in run.items()}
    files |= {f"photos/{i}.png": encoded(Image.fromarray(p), "PNG") for i, p in enumerate(pictures())}
    files |= {f"set/{s}/{c}/{i}.png": files[f"photos/{i}.png"] for s in ("train", "val") for i in (0, 1) for c in "ab"}
    files |= {"mine.py": RECIPE.encode(), "labels.json": b'{"0": [0], "1": [1]}', "names.json": b'["cat", "dog"]'}
    files |= {"tokenizer.json": models["towers"]["tokenizer.json"]}
    text = """predict model photos --top 2 --json
predict model photos/0.png photos/*.png --image-size 24x16 --batch-size 2
predict model set --features out.npy --weights int8
evaluate model set --labels labels.json --batch-size 2 --json
fewshot model set --shots 1 --seeds 1 --no-cache
search towers red photos --top 1 --json
zeroshot towers set --classes names.json --no-cache --json
retrieve towers shapes --examples 4 --no-cache
tokenizer show tokenizer.json star --length 4
cost soft_s16_128e --image-size 224
cost vit_b16 --json
plan soft_s16_128e --devices 8
report run --out out.html
doctor model
soup model model --out soup
upcycle dense --experts 2 --out up
train mine.py --dry-run
train quickstart --dry-run --steps 5 --optim.head-decay 0.1 --data.train shapes?size=32
train run --dry-run
evaluate model set --examples 3 --image-size 16
--help
--version
nothing"""
    return LineSeeds(files, [line.split() for line in text.splitlines()])


def line_make(rng: random.Random, seeds: LineSeeds) -> Case:
    words = rng.choice(seeds.lines)
    if rng.random() < 0.15:
        name = rng.choice(("mine.py", "labels.json", "names.json"))
        change = mutate_json if name.endswith(".json") else mutate_bytes
        given = {"mine.py": 16, "labels.json": 3, "names.json": 6}[name]
        return Case({name: change(rng, seeds.files[name])}, {"argv": seeds.lines[given]})
    argv = mutate_words(rng, words)
    if "train" in argv and "--dry-run" not in argv:
        argv.append("--dry-run")  # training itself is not what is tried here
    if argv and argv[0] in ("bench", "quickstart", "serve", "study", "finetune", "export"):
        argv = argv[1:]
    return Case({}, {"argv": argv})


def line_run(case: Case, folder: Path, seeds: LineSeeds) -> str:
    from softmoe.cli import main

    Case(seeds.files | case.files).write(folder)
    os.environ["SOFTMOE_CACHE"] = str(folder / "cache")
    out, err, here = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(folder)
    exited = False
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(case.call["argv"])
    except SystemExit as end:  # the parser's own words fill several lines
        code, exited = end.code, True
    finally:
        os.chdir(here)
    if code not in (0, 1, 2, None):
        raise Wrong(f"exit code {code}")
    said = err.getvalue() or out.getvalue()  # without a word of its own the command prints its usage
    if "Traceback" in said or (code == 2 and not exited and said.count("softmoe: error:") != 1 and case.call["argv"]):
        raise Wrong(f"exit code {code}: {said[-500:]}")
    if code == 2:
        raise ValueError(said.strip().splitlines()[-1] if said.strip() else "")
    return "right"


LINES = Set(line_seeds, line_make, line_run, seconds=60)
