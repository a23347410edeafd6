"""Planted defects of every kind, for the fuzzer's own tests."""

import math
import os
import random
from pathlib import Path
from typing import Any

from fuzzing.cases import Case, Set, Wrong


def planted_run(case: Case, folder: Path, _: Any) -> str:
    match case.call["kind"]:
        case "right":
            return "right"
        case "sentence":
            raise ValueError("one line")
        case "paragraph":
            raise ValueError("one line\nand another")
        case "traceback":
            raise KeyError("x")
        case "wrong":
            raise Wrong("other weights")
        case "memory":
            return str(len(bytearray(600_000_000)))[:0] + "right"
        case "crash":
            os.abort()
        case _:
            while True:
                math.sqrt(2)


def planted_make(rng: random.Random, kinds: list[str]) -> Case:
    return Case({"x": b""}, {"kind": rng.choice(kinds)})


KINDS = ["right", "sentence", "paragraph", "traceback", "wrong", "memory", "crash", "hang"]
PLANTED = Set(lambda _: KINDS, planted_make, planted_run, seconds=2)
