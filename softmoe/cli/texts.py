"""`softmoe search`, `zeroshot`, `retrieve` and `tokenizer`: models of images and texts."""

import json
import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from softmoe.cli.evaluate import measure
from softmoe.cli.parse import Printed, parse, percent_on_terminal
from softmoe.evaluate import Retrieve, Search, ZeroShot
from softmoe.paths import unused_path
from softmoe.storage.files import write_bytes


@dataclass(frozen=True, kw_only=True)
class SearchArguments(Search):
    """Find images by a sentence, and write a page with thumbnails."""

    out: Path | None = None
    """Where the page goes; search.html here if not given, with a number if there is one."""
    json: bool = False
    """Print the result as JSON and write no page."""


def search_command(argv: list[str]) -> int:
    a = parse(SearchArguments, argv, "search")

    from softmoe.evaluate.find import write_page

    found = a.run(percent_on_terminal("features"))
    if a.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    for hit in found.hits[:10]:
        print(f"{hit.score:6.3f}  {hit.path}")
    print(write_page(found, a.out or unused_path(Path("search.html"))))
    if found.unreadable:
        print(f"softmoe: {found.unreadable} files could not be read", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class ZeroShotArguments(Printed, ZeroShot):
    """Accuracy of two towers that know the classes by name only."""


def zeroshot_command(argv: list[str]) -> int:
    return measure(ZeroShotArguments, argv, "zeroshot", zeroshot_text)


def zeroshot_text(report: dict[str, Any]) -> str:
    numbers = "   ".join(f"{name} {value:.2%}" for name, value in report["numbers"].items())
    counts = f"{report['images']:,} images, {len(report['classes'])} classes, {len(report['templates'])} templates"
    return f"{numbers}   (chance {report['chance']:.2%})\n{counts}"


@dataclass(frozen=True)
class RetrieveArguments(Printed, Retrieve):
    """Recall at 1, 5 and 10 of two towers, both ways, among all images and all captions of the data."""


def retrieve_command(argv: list[str]) -> int:
    return measure(RetrieveArguments, argv, "retrieve", retrieval_text)


def retrieval_text(report: dict[str, Any]) -> str:
    lines = []
    for way in ("image_to_text", "text_to_image"):
        found = dict(report[way])
        median = found.pop("median_rank")
        numbers = "   ".join(f"{name} {value:6.2%}" for name, value in found.items())
        lines.append(f"{way.replace('_', ' '):<15}{numbers}   median rank {median:g}")
    left = f"; {report['left_out']} images were left out" if report["left_out"] else ""
    return "\n".join([*lines, f"{report['images']:,} images with {report['captions']:,} captions{left}"])


@dataclass(frozen=True)
class TrainTokenizer:
    """Learn a tokenizer from the captions of a source."""

    data: str
    """Source of images with captions: wds:PATTERN, pairs:PATH, hf:NAME, shapes."""
    _: KW_ONLY
    size: int = 8192
    """Tokens, at most."""
    out: Path = Path("tokenizer.json")
    """.json: byte-level BPE (tokenizers); .model: SentencePiece."""
    split: str = "train"
    examples: int = 100_000
    """Look at the captions of so many images at most, drawn at random."""
    keep_case: bool = False
    """Learn capital letters too; train with --text.lower False then."""


@dataclass(frozen=True)
class ShowTokens:
    """Show what a tokenizer makes of a text."""

    file: Path
    text: str
    _: KW_ONLY
    length: int = 16
    keep_case: bool = False


def tokenizer_command(argv: list[str]) -> int:
    commands = {"train": TrainTokenizer, "show": ShowTokens}
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: softmoe tokenizer train DATA [--size 8192] [--out FILE]\n       softmoe tokenizer show FILE TEXT")
        return 0 if argv else 2
    if argv[0] not in commands:
        raise ValueError(f"softmoe tokenizer has the commands train and show, not {argv[0]!r}")
    a = parse(commands[argv[0]], argv[1:], f"tokenizer {argv[0]}")
    return train_tokenizer_file(a) if isinstance(a, TrainTokenizer) else show_tokens(a)


def train_tokenizer_file(a: TrainTokenizer) -> int:
    from softmoe.data import Captioned, open_source, some_captions, train_tokenizer

    source = Captioned(open_source(a.data, a.split), a.data)
    tokenizer = train_tokenizer(some_captions(source, a.examples), a.size, a.out.suffix, lower=not a.keep_case)
    write_bytes(a.out, tokenizer.data)
    print(f"{tokenizer.size:,} tokens in {a.out}")
    return 0


def show_tokens(a: ShowTokens) -> int:
    from softmoe.data import Tokenizer

    tokenizer = Tokenizer.open(a.file, lower=not a.keep_case)
    numbers = tokenizer.encode([a.text], a.length)[0].tolist()
    print(" ".join(map(str, numbers)))
    print(tokenizer.decode(numbers))
    return 0
