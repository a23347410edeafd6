"""Check the built site: every link, image and script of every page leads to a file that is there, and to a place in it.

    python tools/check_site.py build/docs

Exit code 1 if one does not, if a page would load something from elsewhere, or if a page in api/ describes
nothing. Links to other sites are only counted: whether they still answer is theirs to know.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag


class Page(HTMLParser):
    """The names of a page's places, and where it leads: `links` are followed by readers, `loads` by the browser."""

    def __init__(self, text: str):
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.places.update(filter(None, (found.get("id"), found.get("name"))))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        if tag in ("img", "script", "iframe", "source") and found.get("src"):
            self.loads.append(found["src"] or "")
        if tag == "link" and found.get("rel") != "canonical" and found.get("href"):
            self.loads.append(found["href"] or "")


def problems(root: Path) -> tuple[int, int, list[str]]:
    """Return how many links were followed, how many lead elsewhere, and what is wrong."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.html"))}
    followed, elsewhere, wrong = 0, 0, []
    for path, page in pages.items():
        for target in (*page.links, *page.loads):
            if target.startswith(("http://", "https://", "mailto:", "data:")):
                elsewhere += 1
                if target in page.loads and not target.startswith("data:"):
                    wrong.append(f"{path.relative_to(root)}: loads {target}")
                continue
            followed += 1
            name, place = urldefrag(target)
            file = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            if not file.is_file():
                wrong.append(f"{path.relative_to(root)}: there is no {target}")
            elif place and file in pages and unquote(place) not in pages[file].places:
                wrong.append(f"{path.relative_to(root)}: {target} has no such place")
        described = any(place.startswith("softmoe.") for place in page.places)
        if path.parent == root / "api" and path.name != "index.html" and not described:
            wrong.append(f"{path.relative_to(root)}: describes nothing")
    return followed, elsewhere, wrong


def main() -> int:
    root = Path(sys.argv[1]).resolve()
    followed, elsewhere, wrong = problems(root)
    print("\n".join(wrong) if wrong else f"{root}: {followed:,} links lead somewhere, {elsewhere:,} lead elsewhere")
    return 1 if wrong or not followed else 0


if __name__ == "__main__":
    sys.exit(main())
