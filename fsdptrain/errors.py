"""Exceptions.

The command line prints the message as one line and exits with code 2. A message names the flag or file, the value and
the fix.
"""

import re
import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = (str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_NOT_OF_THE_USER = ("<", *(f"{folder}/" for folder in _LIBRARIES))
_FLAG = re.compile(r"--(no-)?([a-z][a-z0-9-]*[a-z0-9])")
OPTIONS: set[str] = set()  # flat keys of all options
in_python = True  # messages name keywords (lr) in place of flags (--lr); the command line turns it off


class FsdptrainError(Exception):
    """Base class of all errors that a user can cause and fix. Each argument is one problem."""

    def __str__(self) -> str:
        text = "; ".join(map(str, self.args))
        return _FLAG.sub(_keyword, text) if in_python else text

    @property
    def lines(self) -> list[str]:
        """One line for each problem."""
        return [" ".join(str(problem).splitlines()) for problem in self.args]


class ConfigError(FsdptrainError, ValueError):
    """A flag, a recipe key, or a combination of them is invalid."""


class CheckpointError(FsdptrainError):
    """A model or training checkpoint is missing, corrupt or of another model."""


class DataError(FsdptrainError):
    """A data set, a column or a row is unusable."""


class RewardError(FsdptrainError):
    """Too many samples could not be scored."""


class RolloutError(FsdptrainError):
    """An engine failed or exceeded its deadline."""


class MemoryPlanError(FsdptrainError):
    """The run does not fit into memory, or the device is out of it."""


class NumericsError(FsdptrainError):
    """Trainer and unmodified model disagree, or gradients are non-finite too often."""


class RankError(FsdptrainError):
    """Other ranks are unreachable."""


def _keyword(match: re.Match[str]) -> str:
    """Return the keyword of a flag: `lr` for `--lr`, `export=False` for `--no-export`."""
    name = match[2].replace("-", "_")
    return match[0] if name not in OPTIONS else f"{name}=False" if match[1] else name


def describe(error: BaseException, *, at: str = "") -> str:
    """Format an exception of user code on one line: class, message, and the last file and line number of the user.

    at: the place to name if no line of the user raised it.
    """
    message = (str(error).strip() or "no message").splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OF_THE_USER)]
    if own or not at:
        at = next((f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own or frames)), "")
    return f"{type(error).__name__}: {message}" + (f" ({at})" if at else "")
