"""The recipes that the package includes: files, names, and the header by which they are listed.

The first line of a recipe says what it trains, and another line of the first comment on which hardware:

    # GRPO of Qwen3-4B on grade-school mathematics.
    # Hardware: 8 x 80 GB
"""

import re
from pathlib import Path

from fsdptrain.errors import ConfigError
from fsdptrain.registry import suggest

FOLDER = Path(__file__).parents[1] / "recipes"
SUFFIXES = (".yaml", ".yml")
_SENTENCE = re.compile(r"# (.+\.)")
_HARDWARE = re.compile(r"# Hardware: (.+)")
_COMMENT = re.compile(r"(?:#.*\n)+")


def recipe_names() -> list[str]:
    """Return the names of the included recipes: file names without the suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(name: str | Path, *, what: str = "--recipe") -> Path:
    """Return the file `name`, or the included recipe of that name. Raises ConfigError for an unknown name.

    The name of a file that does not exist is returned unchanged if it is a path, not a name.
    """
    path, text = Path(name), str(name)
    if path.exists() and not path.is_dir():
        return path
    if text in recipe_names():
        return FOLDER / f"{text}.yaml"
    if text.endswith(SUFFIXES) and path.stem in recipe_names() and not path.exists():
        raise ConfigError(f"{what} {text} cannot be read: No such file or directory; did you mean {path.stem!r}?")
    if text.endswith(SUFFIXES) or "/" in text or path.is_dir() or not text.isprintable():
        return path
    raise ConfigError(
        f"{what} {text} is no file and no recipe of fsdptrain{suggest(text, recipe_names())}; "
        "`fsdptrain recipes` lists them"
    )


def read_summary(path: Path) -> tuple[str, str, str]:
    """Return the name of a recipe, and hardware and sentence of its header. "-": it lacks the line."""
    text = path.read_text()
    header = _COMMENT.match(text)
    lines = header[0].splitlines() if header else []
    about = next((found[1] for line in lines[:1] if (found := _SENTENCE.fullmatch(line))), "-")
    hardware = next((found[1] for line in lines if (found := _HARDWARE.fullmatch(line))), "-")
    return path.stem, hardware, about
