"""A command is a frozen dataclass: its fields are the options, in Python and on the command line, and `run` does it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from softmoe.evaluate.features import Progress

Names = str | Path | Sequence[str | Path]
"""One file, folder or pattern, or several."""
Options = ParamSpec("Options")
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True, kw_only=True)
class OverImages:
    """The options of every command that runs a saved model over images."""

    image_size: int | tuple[int, int] | None = None
    """Pixels, or HEIGHTxWIDTH; the size the model was saved with if not given."""
    batch_size: int = 128
    workers: int = 0
    """Processes that read images."""
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class OverFeatures(OverImages):
    """The options of the commands that compute features, which are kept for the next time."""

    cache: bool = True
    """Do not keep the features in $SOFTMOE_CACHE (or ~/.cache/softmoe)."""

    def feature_options(self, progress: Progress | None) -> dict:
        """Arguments for `extract`."""
        names = ("batch_size", "workers", "cache")
        return {name: getattr(self, name) for name in names} | {"progress": progress}


class Command(Protocol[Result]):
    def run(self, progress: Progress | None = None) -> Result: ...


def function(command: Callable[Options, Command[Result]]) -> Callable[Options, Result]:
    """The command as a function of its options."""

    def call(*args: Options.args, **options: Options.kwargs) -> Result:
        return command(*args, **options).run()

    call.__doc__ = f"{command.__doc__} Options are the fields of {getattr(command, '__name__', 'the command')}."
    return call


def as_list(names: Names) -> list[str]:
    return [str(names)] if isinstance(names, str | Path) else [str(name) for name in names]
