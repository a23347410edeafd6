"""Try damaged and hostile inputs by the thousand, and sort what happens: right, one clear sentence, or a defect.

    python tools/fuzz.py                                      all sets, two minutes, seed 0
    python tools/fuzz.py --inputs 100000 --seconds 7200 --resume fuzz.json
    python tools/fuzz.py --sets images archives --seed 7
    python tools/fuzz.py --replay fuzz_failures/images-0-123

Input number i of a set is a function of (seed, set, i) alone. Inputs run in long-lived child processes, a set each at a
time: with a limit on their address space, one on the memory an input may add, and a watchdog that kills a child whose
input takes too long. A defect is a crash, a hang, any exception but ValueError or OSError of one line, memory above the
bound, or a result that should not have been given. The input of every defect is written into a folder of its own
(three for each place in the code) with what happened, for --replay. Exit code 0 if there was none.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing.cases import Case, tree
from fuzzing.children import Child, Outcome, attempt, generator
from fuzzing.sets import SHARES, find_set

BATCH = 50  # inputs a child is given at a time
LIFETIME = 5000  # inputs after which a child is replaced
KEPT = 3  # inputs kept for each place in the code
OUTCOMES = ("right", "sentence", "crash", "hang", "traceback", "memory", "wrong")


@dataclass
class Progress:
    """What was done, as it is kept for --resume."""

    seed: int
    done: dict[str, int] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    defects: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path | None, seed: int) -> "Progress":
        if path is None or not path.is_file():
            return cls(seed)
        found = cls(**json.loads(path.read_text()))
        if found.seed != seed:
            raise ValueError(f"{path} is of the seed {found.seed}, not {seed}")
        return found

    def write(self, path: Path | None) -> None:
        if path is not None:
            beside = path.with_name(f".{path.name}.tmp")
            beside.write_text(json.dumps(vars(self), indent=2) + "\n")
            beside.replace(path)

    def add(self, name: str, outcome: Outcome) -> None:
        self.done[name] = self.done.get(name, 0) + 1
        count = self.counts.setdefault(name, {})
        count[outcome.kind] = count.get(outcome.kind, 0) + 1


def fuzz(arguments: argparse.Namespace) -> Progress:
    """Run the sets side by side, so many children as there are cores, until the inputs or the seconds are used up."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the children
    context = multiprocessing.get_context("spawn")
    progress = Progress.read(arguments.resume, arguments.seed)
    begun, spent, written = time.monotonic(), progress.seconds, 0.0
    names = list(arguments.sets)
    total = sum(SHARES.get(name, 1) for name in names)
    wanted = {name: -(-arguments.inputs * SHARES.get(name, 1) // total) for name in names}
    given = {name: progress.done.get(name, 0) for name in names}
    turn = BATCH * max(4, int(arguments.seconds) // 60)  # a child starts in seconds: longer turns in longer runs
    children: list[Child] = []
    lost: dict[str, list[tuple[int, int]]] = {name: [] for name in names}  # what a dead child was to do

    def next_span(name: str) -> tuple[int, int] | None:
        if lost[name]:
            return lost[name].pop()
        if given[name] >= wanted[name]:
            return None
        span = given[name], min(given[name] + BATCH, wanted[name])
        given[name] = span[1]
        return span

    def behind() -> str | None:
        """The set that has the smallest part of its share and work left."""
        open_sets = [name for name in names if lost[name] or given[name] < wanted[name]]
        return min(open_sets, key=lambda n: (sum(c.name == n for c in children), given[n] / wanted[n]), default=None)

    try:
        while time.monotonic() - begun < arguments.seconds:
            while len(children) < arguments.processes and (name := behind()) is not None:
                children.append(Child(context, name, arguments.seed, arguments.work))
                children[-1].span = (0, 0)  # until it is ready
            if not children:
                break
            multiprocessing.connection.wait([child.link for child in children], timeout=0.5)
            if time.monotonic() > written + 1:
                written = time.monotonic()
                progress.seconds = spent + written - begun
                progress.write(arguments.resume)
            for child in list(children):
                for index, outcome in child.results():
                    progress.add(child.name, outcome)
                    if outcome.defect:
                        keep(arguments, progress, child.name, index, outcome)
                    if outcome.kind in ("crash", "hang") and child.span is not None and index + 1 < child.span[1]:
                        lost[child.name].append((index + 1, child.span[1]))
                if not child.alive:
                    children.remove(child)
                elif child.span is None:
                    waiting = behind()
                    starved = waiting not in (None, child.name) and child.made >= turn
                    span = None if starved or child.made >= LIFETIME else next_span(child.name)
                    child.give(span)
                    if span is None:
                        children.remove(child)
                        child.process.join(10)
                        child.end()
    finally:
        for child in children:
            child.end()
    progress.seconds = spent + time.monotonic() - begun
    progress.write(arguments.resume)
    return progress


def keep(arguments: argparse.Namespace, progress: Progress, name: str, index: int, outcome: Outcome) -> None:
    """Write the input of a defect, unless there are enough from the same place."""
    key = f"{name}: {outcome.kind} {outcome.place}"
    progress.defects[key] = progress.defects.get(key, 0) + 1
    print(f"{name} {index}: {outcome.kind}: {outcome.place}", flush=True)
    if progress.defects[key] > KEPT:
        return
    folder = arguments.failures / f"{name}-{arguments.seed}-{index}"
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"set": name, "seed": arguments.seed, "index": index, "kind": outcome.kind, "place": outcome.place}
    (folder / "outcome.json").write_text(json.dumps(facts | {"said": outcome.said}, indent=2) + "\n")
    command = [sys.executable, __file__, "--write", str(folder), "--work", str(arguments.work)]
    os.spawnv(os.P_WAIT, sys.executable, command)


def write_case(folder: Path, work: Path) -> int:
    """Make the input that outcome.json names once more, and write its files and its call."""
    facts = json.loads((folder / "outcome.json").read_text())
    tried = find_set(facts["set"])
    prepared = tried.prepare(work)
    case = tried.make(generator(facts["seed"], facts["set"], facts["index"]), prepared)
    case.write(folder / "files")
    (folder / "call.json").write_text(json.dumps(case.call) + "\n")
    if getattr(prepared, "process", None) is not None:
        prepared.process.kill()
    return 0


def read_case(folder: Path) -> tuple[str, Case]:
    facts = json.loads((folder / "outcome.json").read_text())
    return facts["set"], Case(tree(folder / "files"), json.loads((folder / "call.json").read_text()))


def replay(folder: Path, work: Path) -> int:
    """Run a kept input in this process, where a debugger can see it."""
    name, case = read_case(folder)
    tried = find_set(name)
    outcome = attempt(tried, case, tried.prepare(work))
    print(f"{outcome.kind} {outcome.place}\n{outcome.said}")
    return 1 if outcome.defect else 0


def table(progress: Progress) -> str:
    """Inputs and outcomes by set, as a table in Markdown."""
    lines = ["| set | inputs | " + " | ".join(OUTCOMES) + " |", "|---|---" + "|---" * len(OUTCOMES) + "|"]
    total: Counter[str] = Counter()
    for name, counts in sorted(progress.counts.items()):
        total.update(counts)
        cells = [f"{counts.get(kind, 0):,}" for kind in OUTCOMES]
        lines.append(f"| {name} | {progress.done[name]:,} | " + " | ".join(cells) + " |")
    cells = [f"{total[kind]:,}" for kind in OUTCOMES]
    return "\n".join([*lines, f"| all | {sum(progress.done.values()):,} | " + " | ".join(cells) + " |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=list(SHARES), choices=[*SHARES, "planted"])
    parser.add_argument("--inputs", type=int, default=10**9, help="of all sets together")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--resume", type=Path, help="file in which the progress is kept, and from which it goes on")
    parser.add_argument("--failures", type=Path, default=Path("fuzz_failures"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / f"softmoe-fuzz-{os.getuid()}")
    parser.add_argument("--replay", type=Path, help="run one kept input")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        return replay(arguments.replay, arguments.work)
    if arguments.write:
        return write_case(arguments.write, arguments.work)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children end too
    progress = fuzz(arguments)
    print(table(progress))
    for key, count in sorted(progress.defects.items()):
        print(f"{count} x {key}")
    print(f"{progress.seconds:.0f} seconds, seed {progress.seed}")
    return 1 if progress.defects else 0


if __name__ == "__main__":
    sys.exit(main())
