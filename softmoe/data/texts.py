"""The captions of a source, and tokenizers of the packages tokenizers or sentencepiece (extra: text).

    tokenizer.json     a file of the package tokenizers, for example byte-level BPE
    tokenizer.model    a file of SentencePiece, for example T5's

As in the paper's code a text is put in lower case, ends with an end token, also if it is truncated, and is padded with
end tokens.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softmoe.data.decode import BrokenImage
from softmoe.data.order import order
from softmoe.data.source import Example, MinSide, Source, fingerprint
from softmoe.paths import home_path
from softmoe.storage.files import first_line, read_bytes

_ENDS = ("</s>", "<|endoftext|>", "<eos>", "<|end|>", "[SEP]")  # names of the end token; the first that exists counts
_LONGEST = 100  # characters per token beyond which a text is not read, since it would be truncated anyway
_NOT_TEXT = re.compile("[\x00-\x1f\x7f\ufffd\\s]+")


class Tokenizer:
    """A tokenizer made from a file. It pickles as the bytes of the file."""

    def __init__(self, name: str, data: bytes, lower: bool = True):
        """Read a tokenizer file, whose kind is the ending of its name: .json or .model."""
        kind = Path(name).suffix
        if kind not in (".json", ".model"):
            raise ValueError(f"a tokenizer file ends in .json (tokenizers) or .model (SentencePiece), not {name!r}")
        self.name, self.data, self.lower = f"tokenizer{kind}", data, lower
        self._inner: _Json | _Piece = (_Json if kind == ".json" else _Piece)(data, name)
        self.size, self.end = self._inner.size, self._inner.end

    @classmethod
    def open(cls, path: str | Path, lower: bool = True) -> Tokenizer:
        file = home_path(path)
        if not file.is_file():
            raise ValueError(f"there is no tokenizer file {file}; make one with `softmoe tokenizer train`")
        return cls(file.name, read_bytes(file), lower)

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(self.data + bytes([self.lower]), digest_size=12).hexdigest()

    def encode(self, texts: Sequence[str], length: int) -> torch.Tensor:
        """Return token numbers, (texts, length) int64. Truncated texts keep their end token; short ones are padded."""
        if length < 1:
            raise ValueError(f"the length of texts must be at least 1, got {length}")
        rows = torch.full((len(texts), length), self.end, dtype=torch.int64)
        for row, numbers in zip(rows, self._inner.encode([self.prepare(t, length) for t in texts]), strict=True):
            kept = numbers[: length - 1]
            row[: len(kept)] = torch.tensor(kept, dtype=torch.int64)
        return rows

    def decode(self, numbers: Sequence[int]) -> str:
        return self._inner.decode([number for number in numbers if number != self.end])

    def prepare(self, text: str, length: int | None = None) -> str:
        cut = text if length is None else text[: _LONGEST * length]
        return normal_text(cut).lower() if self.lower else normal_text(cut)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.name, self.data, self.lower)


def normal_text(text: str) -> str:
    """Replace control characters, invalid UTF-8 and runs of spaces by single spaces."""
    return _NOT_TEXT.sub(" ", text.encode("utf-8", "replace").decode("utf-8")).strip()


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn the errors of the package tokenizers into a ValueError.

    It raises plain Exception, and for some broken files a panic of its Rust code, which is not even an Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{name} is not a tokenizer file of the package tokenizers: {first_line(error)}") from error


class _Json:
    def __init__(self, data: bytes, name: str):
        tokenizers, self.name = _package("tokenizers"), name
        with _reading(name):
            self.inner = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        self.inner.no_padding()
        self.inner.no_truncation()
        self.inner.encode_special_tokens = True  # "</s>" in a caption is text like any other
        self.size = self.inner.get_vocab_size()
        ends = [self.inner.token_to_id(word) for word in _ENDS]
        self.end = next((end for end in ends if end is not None), -1)
        if self.end < 0:
            raise ValueError(f"the tokenizer {name} has no end token: none of {', '.join(_ENDS)}")
        largest = max(self.inner.get_vocab().values())
        if largest >= self.size:
            raise ValueError(f"the tokenizer {name} has the token number {largest}, but {self.size} tokens only")

    def encode(self, texts: list[str]) -> list[list[int]]:
        with _reading(self.name):
            return [found.ids for found in self.inner.encode_batch(texts, add_special_tokens=False)]

    def decode(self, numbers: list[int]) -> str:
        with _reading(self.name):
            return self.inner.decode(numbers).strip()


class _Piece:
    def __init__(self, data: bytes, name: str):
        sentencepiece = _package("sentencepiece")
        self.inner = sentencepiece.SentencePieceProcessor()
        try:
            self.inner.LoadFromSerializedProto(data)
            self.size = self.inner.GetPieceSize()
        except Exception as error:
            raise ValueError(f"{name} is not a SentencePiece file: {first_line(error)}") from error
        self.end = self.inner.eos_id()
        if self.size < 1 or self.end < 0:
            raise ValueError(f"the SentencePiece file {name} has no end token")

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.inner.EncodeAsIds(texts) if texts else []

    def decode(self, numbers: list[int]) -> str:
        return self.inner.DecodeIds(numbers)


def train_tokenizer(texts: Iterable[str], size: int, kind: str = ".json", lower: bool = True) -> Tokenizer:
    """Learn at most `size` tokens: byte-level BPE (.json), or a SentencePiece unigram model (.model).

    Both can encode any text, since they spell unknown characters in bytes.
    """
    if kind not in (".json", ".model"):
        raise ValueError(f"a tokenizer file ends in .json or .model, not {kind!r}")
    if size < 300:
        raise ValueError(f"a tokenizer needs at least 300 tokens (256 are the bytes), got {size}")
    lines = _lines(texts, lower)
    first = next(lines, None)
    if first is None:
        raise ValueError("there are no captions to learn tokens from")
    train = _train_bpe if kind == ".json" else _train_sentencepiece
    return Tokenizer(f"tokenizer{kind}", train(itertools.chain([first], lines), size), lower)


def _lines(texts: Iterable[str], lower: bool) -> Iterator[str]:
    for text in texts:
        line = normal_text(text)
        if line:
            yield line.lower() if lower else line


def _train_bpe(lines: Iterator[str], size: int) -> bytes:
    tokenizers = _package("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<unk>", "</s>"],  # the end token is number 1, as in T5's
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(lines, trainer)
    return inner.to_str().encode()


def _train_sentencepiece(lines: Iterator[str], size: int) -> bytes:
    sentencepiece = _package("sentencepiece")
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=lines,
            model_writer=out,
            vocab_size=size,
            hard_vocab_limit=False,
            byte_fallback=True,
            character_coverage=1.0,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"SentencePiece cannot learn {size} tokens from these captions: {first_line(error)}"
        ) from error
    return out.getvalue()


def _package(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the wrapper generator of some versions
            return __import__(name)
    except ImportError as error:
        raise ValueError(f"texts need the package {name}: pip install 'softmoe-vit[text]'") from error


_AT_ONCE = 1000  # examples whose captions are read together
_TRIED = 32  # examples that are looked at for captions


def captions_of(source: Source, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
    """Return the usable captions of some examples, without decoding their images where the source can."""
    read: Callable[..., list[tuple[str, ...]]] | None = getattr(source, "read_captions", None)
    if read is not None:
        return [usable(captions) for captions in read(indices)]
    found = []
    for index in indices:
        try:
            found.append(usable(source.read(int(index), 1).captions))
        except BrokenImage:
            found.append(())
    return found


def usable(captions: Sequence[str]) -> tuple[str, ...]:
    """Return the captions that have any text."""
    return tuple(caption for caption in captions if normal_text(caption))


def some_captions(source: Source, most: int, seed: int = 0) -> Iterator[str]:
    """Yield all captions of at most `most` examples, drawn at random but always the same."""
    chosen = order(len(source), seed, 0, min(len(source), most))
    for start in range(0, len(chosen), _AT_ONCE):
        for captions in captions_of(source, chosen[start : start + _AT_ONCE]):
            yield from captions


class Captioned(Source):
    """A source in which an image without a caption counts as unreadable."""

    def __init__(self, source: Source, name: str):
        if not any(captions_of(source, range(min(_TRIED, len(source))))):
            raise ValueError(
                f"the data {name} has no captions, and texts are learned from captions: take a source that has them "
                "(wds: with .txt or .json parts, pairs:, hf:, shapes)"
            )
        self.source = source
        self.classes, self.multi_label = source.classes, source.multi_label
        self.fingerprint = fingerprint("captioned", source.fingerprint)  # it may have fewer readable images
        if getattr(source, "blocks", None) is not None:
            self.blocks, self.mix = source.blocks, source.mix  # pyright: ignore[reportAttributeAccessIssue]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        example = self.source.read(index, min_side)
        captions = usable(example.captions)
        if not captions:
            raise BrokenImage(example.name, "it has no caption")
        return replace(example, captions=captions)

    def read_captions(self, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
        return captions_of(self.source, indices)

    def read_batch(self, indices: Sequence[int] | np.ndarray, captions: bool = True) -> list[Example] | None:
        """Read all at once where the source can and all have captions; None asks for one after another."""
        inner = getattr(self.source, "read_batch", None)
        examples: list[Example] | None = None if inner is None else inner(indices)
        found = [replace(e, captions=usable(e.captions)) for e in examples or []]
        return found if found and all(e.captions for e in found) else None
