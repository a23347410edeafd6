"""What the pages name is there, and the check of the built site finds what is not."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
NAMED = re.compile(r"\b(?:docs|tests|softmoe|tools|examples)/[\w/.-]+\.(?:md|py|ipynb|png|html|svg)\b")


def test_paths_that_pages_name_are_there():
    """In links and in plain words, of the README, the changelog and every page of the site."""
    named = {(page.name, path) for page in PAGES for path in NAMED.findall(page.read_text("utf-8"))}
    assert len(named) > 30
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()] == []


def test_a_page_of_the_api_that_describes_nothing_is_found(tmp_path: Path):
    """One with a name in it is not; links that lead nowhere are found as well."""
    problems = runpy.run_path(str(ROOT / "tools" / "check_site.py"))["problems"]
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "index.html").write_text("<a href='moe.html#softmoe.moe.SoftMoE'>moe</a>")
    (tmp_path / "api" / "moe.html").write_text("<dt id='softmoe.moe.SoftMoE'>SoftMoE</dt>")
    assert problems(tmp_path) == (1, 0, [])
    (tmp_path / "api" / "data.html").write_text("<h1 id='module-softmoe.data'>data</h1><a href='none.html'>x</a>")
    assert problems(tmp_path)[2] == ["api/data.html: there is no none.html", "api/data.html: describes nothing"]
