"""Damaged tokenizer files, of both kinds."""

import random
from pathlib import Path
from typing import Any

from fuzzing.cases import Case, Files, Set, Wrong, built, tree
from fuzzing.mutations import mutate_bytes, mutate_json


def save_tokenizers(folder: Path) -> None:
    from softmoe.data import open_source, some_captions, train_tokenizer

    folder.mkdir()
    texts = list(some_captions(open_source("shapes", "train"), 300))
    for kind in (".json", ".model"):
        (folder / f"tokenizer{kind}").write_bytes(train_tokenizer(texts, 320, kind).data)


def tokenizer_seeds(work: Path) -> Files:
    return tree(built(work, "tokenizers", save_tokenizers))


def tokenizer_make(rng: random.Random, seeds: Files) -> Case:
    name = rng.choice(list(seeds))
    change = mutate_json if name.endswith(".json") and rng.random() < 0.8 else mutate_bytes
    return Case({name: change(rng, seeds[name])})


def tokenizer_run(case: Case, _: Path, seeds: Any) -> str:
    from softmoe.data import Tokenizer

    ((name, data),) = case.files.items()
    tokenizer = Tokenizer(name, data)
    numbers = tokenizer.encode(["a red star", "", "\x00é世 " * 50], 8)
    if numbers.shape != (3, 8) or not 0 <= int(numbers.min()) <= int(numbers.max()) < tokenizer.size:
        raise Wrong(f"numbers from {int(numbers.min())} to {int(numbers.max())} of {tokenizer.size}")
    tokenizer.decode(numbers[0].tolist())
    return "right"


TOKENIZERS = Set(tokenizer_seeds, tokenizer_make, tokenizer_run)
