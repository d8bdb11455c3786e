"""Hooks of mkdocs: pages of the docs may link to files of the repository, as they do on a code host.

Each linked file outside of docs/ becomes a page under repository/ (its source, highlighted) or, for an image, a copy. Links are
rewritten to match. Links between pages stay as they are.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".json": "json", ".toml": "toml"}
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")  # in the navigation
WIDE = {"configuration.md", "metrics.md", "models.md", "scaling.md", "what_works.md"}  # tables need the space of the contents


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files of the repository, and those that they link to."""
    todo = [page.src_uri for page in files.documentation_pages()]
    sources = {f"docs/{uri}": (ROOT / "docs" / uri).read_text(encoding="utf-8") for uri in todo}
    found: dict[str, str] = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    queue = [*sources.items(), *found.items()]
    for source, text in queue:
        for target, _ in LINK.findall(text):
            path = _in_repository(source, target)
            if path.startswith("docs/") or path in found or not (ROOT / path).is_file():
                continue
            if PurePosixPath(path).suffix == ".png":
                files.append(File.generated(config, f"repository/{path}", content=(ROOT / path).read_bytes()))
                found[path] = ""
                continue
            found[path] = (ROOT / path).read_text(encoding="utf-8")
            if path.endswith(".md"):
                queue.append((path, found[path]))
    for path, text in found.items():
        if text:
            files.append(File.generated(config, _site_path(path), content=_page(path, text)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite the links that cross the border of docs/."""
    uri = page.file.src_uri
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
    source = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"

    def rewritten(match: re.Match[str]) -> str:
        path = _in_repository(source, match[1])
        is_inside = path.startswith("docs/") and source.startswith("docs/")
        target = match[1] if is_inside else os.path.relpath(_site_path(path), PurePosixPath(uri).parent)
        return target + (match[2] or "")

    return LINK.sub(rewritten, markdown)


def _in_repository(source: str, target: str) -> str:
    """Path in the repository of the `target` of a link in the file `source`."""
    return os.path.normpath(PurePosixPath(source).parent / target)


def _site_path(path: str) -> str:
    """Path in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if PurePosixPath(path).suffix in {".md", ".png"} else f"repository/{path}.md"


def _page(path: str, text: str) -> str:
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {PurePosixPath(path).name}\n\n`{path}`\n\n````{language}\n{text}\n````\n"
