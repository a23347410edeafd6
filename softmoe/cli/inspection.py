"""`softmoe inspect` and `softmoe doctor`: what the routers of a model do, and what is wrong with it."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from softmoe.cli.parse import parse, percent_on_terminal
from softmoe.inspection.api import Doctor, Inspect

if TYPE_CHECKING:
    from softmoe.inspection.doctor import Verdict


def inspect_command(argv: list[str]) -> int:
    models, written = parse(Inspect, argv, "inspect").run(percent_on_terminal("inspecting"))

    from softmoe.inspection import plots
    from softmoe.inspection.page import layers_text, notes_of

    for model in models:
        print(f"{model.name}: {model.images:,} images\n{layers_text(model)}\n")
    print("\n".join(f"{columns}: {meaning}" for columns, meaning in notes_of(models)) + "\n")
    if not plots.available():
        print("softmoe: no figures were drawn, they need matplotlib: pip install 'softmoe-vit[plots]'", file=sys.stderr)
    for path in written:
        if path.suffix != ".svg":
            print(path)
    return 0


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(Doctor):
    """Check a model or a run. Exit code 0 if nothing is wrong, 1 if something is."""

    json: bool = False
    """Print as JSON."""


def doctor_command(argv: list[str]) -> int:
    a = parse(DoctorArguments, argv, "doctor")
    verdicts = a.run()
    wrong = sum(v.wrong is True for v in verdicts)
    if a.json:
        print(
            json.dumps({"model": str(a.model), "wrong": wrong, "verdicts": [v.to_dict() for v in verdicts]}, indent=2)
        )
    else:
        print("\n".join(verdict_line(v) for v in verdicts))
        print(f"\n{a.model}: {verdict_summary(verdicts, wrong)}")
    return 1 if wrong else 0


def verdict_summary(verdicts: "list[Verdict]", wrong: int) -> str:
    """Say what was looked at, and what came of it."""
    known = [v.check for v in verdicts if v.wrong is not None]
    left = len(verdicts) - len(known)
    told = f"{wrong} of {len(known)} checks found something wrong" if wrong else "nothing is wrong"
    return f"{told} ({', '.join(dict.fromkeys(known))})" + (f"; {left} could not be judged" if left else "")


def verdict_line(v: "Verdict") -> str:
    mark = {True: "WRONG", False: "ok", None: "-"}[v.wrong]
    text = f"{mark:<6} {v.check}: {v.figure}" + (f" (limit: {v.limit})" if v.limit else "")
    return f"{text}\n       {v.advice}" if v.wrong else text
