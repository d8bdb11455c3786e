"""What every case of the campaign of bad inputs is made of."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.command import UNEVALUATED


@dataclass(frozen=True)
class Place:
    """What a case may use: an empty folder of its own, a good checkpoint, and the folder of a finished run."""

    folder: Path
    checkpoint: Path
    finished: Path

    def file(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    @property
    def output(self) -> Path:
        return self.folder / "run"

    def model(self) -> Path:
        return Path(shutil.copytree(self.checkpoint, self.folder / "model", dirs_exist_ok=True))

    def run(self) -> Path:
        """Copy the finished run to the output folder. Returns its newest checkpoint."""
        shutil.copytree(self.finished, self.output)
        return max((self.output / "checkpoints").iterdir())


Prepare = Callable[[Place], list[str]]  # writes the bad input; returns words of the command line


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    prepare: Prepare
    texts: tuple[str, ...]  # on standard error
    code: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    is_fresh: bool = False  # needs an interpreter of its own: its variables are read at import
    why: str = ""  # of another code than 2


def train(place: Place, *words: str) -> list[str]:
    return ["--hf-checkpoint", str(place.checkpoint), "--output-dir", str(place.output), *UNEVALUATED, *words]


def with_file(name: str, content: str | bytes, *words: str) -> Prepare:
    """Train with these words, and a file in the folder of the case."""

    def prepare(place: Place) -> list[str]:
        place.file(name, content)
        return train(place, *words)

    return prepare


def flags(*words: str) -> Prepare:
    return lambda place: train(place, *words)


def edit(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; a key whose value is ... is removed."""
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))


def rewrite(name: str, content: str | bytes | Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Replace the content of the first file that `name` matches, or create it."""

    def apply(model: Path) -> None:
        path = next(iter(sorted(model.glob(name))), model / name)
        new = content(path.read_bytes()) if callable(content) else content
        path.write_bytes(new if isinstance(new, bytes) else new.encode())

    return apply


def remove(*patterns: str) -> Callable[[Path], None]:
    return lambda model: [path.unlink() for pattern in patterns for path in model.glob(pattern)] and None


def shorten(content: bytes) -> bytes:
    return content[: len(content) // 2]


def link_to_itself(path: Path) -> Path:
    path.symlink_to(path)
    return path
