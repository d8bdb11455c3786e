"""The error tree.

    FsdptrainError
    ├── ConfigError          a flag, a recipe key, or a combination of them cannot work
    ├── CheckpointError      a model or training checkpoint is missing, broken or of another model
    ├── DataError            a data set, a column or a row cannot be used
    ├── RewardError          too many samples could not be scored
    ├── RolloutError         an engine failed, or did not answer before its deadline
    ├── MemoryPlanError      the model cannot fit into the memory that is there
    ├── NumericsError        the trainer disagrees with the stock model, or gradients are not finite too often
    └── RankError            other ranks cannot be reached

The command line prints the message of any of these as one line and exits with code 2. A message names the flag (or the
file), the value that was found, and the way out.
"""

import traceback
from pathlib import Path


class FsdptrainError(Exception):
    """Base of every error that a user can cause and mend."""


class ConfigError(FsdptrainError, ValueError):
    """A flag, a recipe key, or a combination of them cannot work."""


class CheckpointError(FsdptrainError):
    """A model or training checkpoint is missing, broken or of another model."""


class DataError(FsdptrainError):
    """A data set, a column or a row cannot be used."""


class RewardError(FsdptrainError):
    """Too many samples could not be scored."""


class RolloutError(FsdptrainError):
    """An engine failed, or did not answer before its deadline."""


class MemoryPlanError(FsdptrainError):
    """The model cannot fit into the memory that is there."""


class NumericsError(FsdptrainError):
    """The trainer disagrees with the stock model, or gradients are not finite too often."""


class RankError(FsdptrainError):
    """Other ranks cannot be reached."""


def describe(error: Exception) -> str:
    """An exception of a user's own function on one line: what, and where in their code."""
    message = (str(error).strip() or "no message").splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {message} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
