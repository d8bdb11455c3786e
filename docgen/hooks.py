"""Hooks of mkdocs: pages of the docs may link to files of the repository, as they do on a code host.

Each linked file outside of docs/ becomes a page under repository/ (its source, or the files of a folder) or, for an
image, a copy. Links are rewritten to match. Links between pages stay as they are.
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
WIDE = {  # tables need the space of the contents
    "coming_from_prime_rl.md",
    "coming_from_slime.md",
    "coming_from_trl.md",
    "coming_from_verl.md",
    "configuration.md",
    "metrics.md",
    "memory.md",
    "models.md",
    "recipes.md",
    "what_works.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files of the repository, and those that they link to."""
    queue = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    queue += PAGES
    added = set(queue)
    for source in queue:
        if not source.startswith("docs/"):
            content = _image(source) or _page(source)
            files.append(File.generated(config, _site_path(source), content=content))
        for path in _links(source):
            if path not in added and not path.startswith("docs/") and (ROOT / path).exists():
                added.add(path)
                queue.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite the links that cross the border of docs/."""
    uri = page.file.src_uri
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
    is_added = uri.startswith("repository/")
    source = uri.removeprefix("repository/") if is_added else f"docs/{uri}"
    if is_added and (ROOT / source.removesuffix(".md")).is_file():  # source code
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        path = _in_repository(source, match[1])
        if path.startswith("docs/") and not is_added:
            return match[0]
        return os.path.relpath(_site_path(path), PurePosixPath(uri).parent) + (match[2] or "")

    return LINK.sub(rewritten, markdown)


def _links(source: str) -> list[str]:
    """Paths in the repository that a page links to."""
    if (ROOT / source).is_dir():
        return [str(path.relative_to(ROOT)) for path in _listed(source)]
    if not source.endswith(".md"):
        return []
    text = (ROOT / source).read_text(encoding="utf-8")
    return [_in_repository(source, target) for target, _ in LINK.findall(text)]


def _in_repository(source: str, target: str) -> str:
    """Path in the repository of the `target` of a link in the file `source`."""
    return os.path.normpath(PurePosixPath(source).parent / target)


def _site_path(path: str) -> str:
    """Path in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if PurePosixPath(path).suffix in {".md", ".png"} else f"repository/{path}.md"


def _listed(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).iterdir() if path.name[0] not in "._")


def _image(path: str) -> bytes | None:
    return (ROOT / path).read_bytes() if path.endswith(".png") else None


def _page(path: str) -> str:
    name = PurePosixPath(path)
    if (ROOT / path).is_dir():
        rows = [f"- [{found.name}]({name.name}/{found.name})\n" for found in _listed(path)]
        return f"# {path}\n\n{''.join(rows)}"
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    head = f"---\nsearch:\n  exclude: true\n---\n# {name.name}\n\n`{path}`\n\n"
    return f"{head}````{LANGUAGES.get(name.suffix, 'text')}\n{text}\n````\n"
