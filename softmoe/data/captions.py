"""The sentences of a source, also without its pictures, and sources in which every image has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from softmoe.data.decode import BrokenImage
from softmoe.data.order import order
from softmoe.data.source import Example, MinSide, Source, fingerprint
from softmoe.data.tokenizer import normal_text

_AT_ONCE = 1000  # examples whose captions are read together
_TRIED = 32  # examples looked at before a source is said to have no captions


def captions_of(source: Source, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
    """The usable captions of some examples, without decoding their images where the source can."""
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
    """Those that say something: not empty, nor only of bytes that are no text."""
    return tuple(caption for caption in captions if normal_text(caption))


def some_captions(source: Source, most: int, seed: int = 0) -> Iterator[str]:
    """All captions of at most `most` examples, drawn at random but always the same."""
    chosen = order(len(source), seed, 0, min(len(source), most))
    for start in range(0, len(chosen), _AT_ONCE):
        for captions in captions_of(source, chosen[start : start + _AT_ONCE]):
            yield from captions


class Captioned:
    """A source in which an image without a caption counts as one that cannot be read."""

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

    def __getitem__(self, index: int) -> Example:
        return self.read(index)

    def read(self, index: int, min_side: MinSide = None) -> Example:
        example = self.source.read(index, min_side)
        if not usable(example.captions):
            raise BrokenImage(example.name, "it has no caption")
        return example

    def read_captions(self, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
        return captions_of(self.source, indices)

    def read_batch(self, indices: Sequence[int] | np.ndarray, captions: bool = True) -> list[Example] | None:
        """All at once where the source can and all have captions; None asks for one after another."""
        inner = getattr(self.source, "read_batch", None)
        examples: list[Example] | None = None if inner is None else inner(indices)
        return examples if examples and all(usable(e.captions) for e in examples) else None
