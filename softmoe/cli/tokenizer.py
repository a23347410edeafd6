"""`softmoe tokenizer train DATA --size 8192 --out FILE`, `softmoe tokenizer show FILE TEXT`."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from softmoe.cli.parse import parse


@dataclass(frozen=True)
class Train:
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
class Show:
    """Show what a tokenizer makes of a text."""

    file: Path
    text: str
    _: KW_ONLY
    length: int = 16
    keep_case: bool = False


def main(argv: list[str]) -> int:
    commands = {"train": Train, "show": Show}
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: softmoe tokenizer train DATA [--size 8192] [--out FILE]\n       softmoe tokenizer show FILE TEXT")
        return 0 if argv else 2
    if argv[0] not in commands:
        raise ValueError(f"softmoe tokenizer has the commands train and show, not {argv[0]!r}")
    a = parse(commands[argv[0]], argv[1:], f"tokenizer {argv[0]}")
    return train(a) if isinstance(a, Train) else show(a)


def train(a: Train) -> int:
    from softmoe.data import Captioned, open_source, some_captions, train_tokenizer

    source = Captioned(open_source(a.data, a.split), a.data)
    tokenizer = train_tokenizer(some_captions(source, a.examples), a.size, a.out.suffix, lower=not a.keep_case)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_bytes(tokenizer.data)
    print(f"{tokenizer.size:,} tokens in {a.out}")
    return 0


def show(a: Show) -> int:
    from softmoe.data import Tokenizer

    tokenizer = Tokenizer.open(a.file, lower=not a.keep_case)
    numbers = tokenizer.encode([a.text], a.length)[0].tolist()
    print(" ".join(map(str, numbers)))
    print(tokenizer.decode(numbers))
    return 0
