"""The README as the package index shows it: built into wheel and source archive by hatchling.

On the index there are no files beside the page. With a `Source` among the project's URLs, links and pictures lead
there; without one, links to files become plain words and pictures are left out, so that nothing is broken.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]+)\)")


def for_index(text: str, source: str | None) -> str:
    def changed(match: re.Match) -> str:
        picture, words, path = match.groups()
        if source is not None:
            return f"{picture}[{words}]({source}/{'raw' if picture else 'blob'}/main/{path})"
        return "" if picture else words

    return LINK.sub(changed, text)


class IndexReadme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        text = Path(self.root, "README.md").read_text("utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, source)}
