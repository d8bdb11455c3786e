"""Links and anchors of the pages resolve, and so does every page that code, recipes and examples name."""

import itertools
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
LINK = re.compile(r"\[[^]]*\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
MENTIONED = re.compile(r"\bdocs/([\w.]+\.md)(?:#([\w-]+))?")
FOLDERS = ("fsdptrain", "recipes", "examples", "benchmarks", "campaigns", "docs", "tests")
SUFFIXES = {".py", ".yaml", ".md", ".sbatch", ".toml", ".json"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_resolve(page: Path) -> None:
    text = CODE.sub("``", page.read_text(encoding="utf-8"))
    broken = []
    for target, anchor in LINK.findall(text):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert not broken


def test_pages_that_files_name_exist() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "Dockerfile", *ROOT.glob("*.md")]
    missing, count = [], 0
    for file in files:
        for name, anchor in MENTIONED.findall(file.read_text(encoding="utf-8")):
            count += 1
            page = ROOT / "docs" / name
            if not page.is_file() or (anchor and anchor not in anchors(page)):
                missing.append(f"{file.relative_to(ROOT)}: docs/{name}#{anchor}")
    assert count > 100
    assert not missing


def test_pages_have_the_form_that_both_renderers_read_alike() -> None:
    """Python-Markdown needs a blank line before a list, and four spaces before what belongs to an item."""
    wrong = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        lines = CODE.sub("``", page.read_text(encoding="utf-8")).splitlines()
        for before, line in itertools.pairwise(lines):
            starts = re.match(r"(- |\d+\. )", line)
            if starts and before.strip() and not re.match(r"(- |\d+\. | |<)", before):
                wrong.append(f"{page.name}: no blank line before: {line[:50]}")
            if re.match(r" {1,3}(- |\d+\. )", line):
                wrong.append(f"{page.name}: indent by four spaces: {line[:50]}")
    assert not wrong


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of the headings, as code hosts and the docs site make them."""
    found: list[str] = []
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.*?) *$", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", shown).strip().lower().replace(" ", "-"))
    return frozenset(found)
