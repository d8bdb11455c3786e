"""The law of a reader, and the place of what breaks it."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdptrain
from fsdptrain.errors import FsdptrainError
from fsdptrain.launch.failures import failure_of
from fsdptrain.vllm.server.client import ServerError

MOST_S = 5.0
LONGEST = 5000  # characters of a message
PACKAGE = Path(fsdptrain.__file__).parent
_opened: list[str] | None = None  # paths that were opened, while a reader runs
_is_hooked = False


class LawError(Exception):
    """A reader broke the law without an exception."""


def reads(read: Callable[[], Any], *, within: Path | None = None) -> None:
    """Call a reader. Raises what it raises against the law, or LawError."""
    global _opened
    _hook()
    start, _opened, error = time.process_time(), [], None
    try:
        read()
    except (FsdptrainError, ServerError) as found:
        error = found
    finally:
        opened, _opened = _opened, None
    seconds = time.process_time() - start
    if seconds > MOST_S:
        raise LawError(f"it took {seconds:.0f} s")
    if error is not None:
        shown = failure_of(error, rank=0).text if isinstance(error, FsdptrainError) else str(error)
        if len(shown.splitlines()) > 1 or len(shown) > LONGEST:
            raise LawError(f"{len(shown.splitlines())} lines, {len(shown)} characters: {shown[:80]!r}") from error
    if within is not None:
        foreign = [path for path in opened if _is_foreign(path, within)]
        if foreign:
            raise LawError(f"it opened {foreign[0]}")


def place_of(error: BaseException) -> tuple[str, str]:
    """Return the class of an error, and the last line of the package that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(PACKAGE)]
    frames = frames or traceback.extract_tb(error.__traceback__)[-1:]
    path = Path(frames[-1].filename)
    shown = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE.parent) else path.name
    return type(error).__name__, f"{shown}:{frames[-1].lineno}"


def _is_foreign(path: str, within: Path) -> bool:
    ours = (within, PACKAGE, Path(sys.prefix), Path(sys.base_prefix), Path("/proc"), Path("/sys"), Path("/dev"))
    resolved = Path(os.path.realpath(path))
    return not any(resolved.is_relative_to(folder.resolve()) for folder in ours) and ".venv" not in resolved.parts


def _hook() -> None:
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_on_event)
        _is_hooked = True


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(args[0], str | os.PathLike):
        _opened.append(os.fspath(args[0]))
