"""`softmoe search MODEL "a red car" FOLDER`: the images that a sentence describes best, as a page."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from softmoe.cli.parse import parse, percent_on_terminal, unused
from softmoe.evaluate import Search


@dataclass(frozen=True, kw_only=True)
class Arguments(Search):
    """Find images by a sentence, and write a page with thumbnails."""

    out: Path | None = None
    """Where the page goes; search.html here if not given, with a number if there is one."""
    json: bool = False
    """Print the result as JSON and write no page."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "search")

    from softmoe.evaluate.find import write_page

    found = a.run(percent_on_terminal("features"))
    if a.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    for hit in found.hits[:10]:
        print(f"{hit.score:6.3f}  {hit.path}")
    print(write_page(found, a.out or unused(Path("search.html"))))
    if found.unreadable:
        print(f"softmoe: {found.unreadable} files could not be read", file=sys.stderr)
    return 0
