"""How far a command is, on a terminal only: nothing is written into logs and pipes."""

import sys
from collections.abc import Callable


def percent_on_terminal(what: str) -> Callable[[int, int], None] | None:
    """A function of (done, all) that keeps one line on the terminal up to date; None where there is no terminal."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r" if done < total else "\r\033[K"
        print(f"\r{what}: {done:,} of {total:,} images", end=end, file=sys.stderr, flush=True)

    return show
