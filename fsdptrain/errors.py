"""Exceptions.

The command line prints the message as one line and exits with code 2. A message names the flag or file, the value and
the fix.
"""

import sysconfig
import traceback
from pathlib import Path

_NOT_OF_THE_USER = (str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<")


class FsdptrainError(Exception):
    """Base class of all errors that a user can cause and fix."""


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
    """Trainer and stock model disagree, or gradients are non-finite too often."""


class RankError(FsdptrainError):
    """Other ranks are unreachable."""


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
