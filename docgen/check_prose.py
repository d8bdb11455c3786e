"""Check pages and messages for the phrases of phrases.txt: `python docgen/check_prose.py [FILE ...]`."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CODE = re.compile(r"^```.*?^```|^(?: {4}|\t).*?$|`[^`\n]+`|\]\([^)\n]*\)|<!--.*?-->", re.MULTILINE | re.DOTALL)


def phrases() -> dict[re.Pattern[str], str]:
    """Return the regular expressions to avoid, each with the words to use."""
    lines = (Path(__file__).parent / "phrases.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" => ") for line in lines if line and not line.startswith("#"))
    return {re.compile(avoid, re.IGNORECASE): plain for avoid, plain in pairs}


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and text of the prose of a page, or of help texts and messages in a source file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        without_code = CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
        yield from enumerate(without_code.splitlines(), 1)
        return
    nodes = list(ast.walk(ast.parse(text)))
    bodies = [node.body for node in nodes if isinstance(node, DOCUMENTED)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from [(node.lineno, node.value)] * (" " in node.value)


def main() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    sources = [*sorted((ROOT / "fsdptrain").rglob("*.py")), ROOT / "fsdptrain/config/other_names.ini"]
    files = [Path(name).resolve() for name in sys.argv[1:]] or [*pages, *sources]
    avoided = phrases()
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match[0]!r}: {plain}\n    {text.strip()[:200]!r}"
        for file in files
        for number, text in prose(file)
        for phrase, plain in avoided.items()
        if (match := phrase.search(text))
    ]
    sys.exit("\n".join(found) or 0)


if __name__ == "__main__":
    main()
