"""Training in this process."""

import logging
import os
import sys
import warnings

from fsdptrain import silence_libraries
from fsdptrain.config import Config
from fsdptrain.errors import FsdptrainError, describe
from fsdptrain.stages import stage


def train(config: Config) -> int:
    """Train in this process. Returns the exit code: 0, or 128 + the signal that ended the run early.

    Raises an error where user code exits or a pipe is closed: the exit code 0 means trained.
    """
    with stage("importing transformers"):
        from fsdptrain.trainer.trainer import Trainer  # import after `configure_logging`

    try:
        result = Trainer(config).fit()
    except SystemExit as error:
        raise FsdptrainError(f"the run was interrupted by {describe(error)}") from error
    except BrokenPipeError as error:  # which the command line takes for the end of its reader
        raise RuntimeError(f"the run was interrupted by {describe(error)}") from error
    return 0 if result.stop_signal is None else 128 + result.stop_signal


def configure_logging(*, rank: int) -> None:
    """Silence other libraries, and log on rank 0 only. Environment variables set by the user are kept."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    silence_libraries()
    log = logging.getLogger("fsdptrain")
    log.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not log.handlers:
        log.addHandler(_CurrentStderr())
    if rank != 0:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        warnings.simplefilter("ignore")


class _CurrentStderr(logging.Handler):
    """Handler that writes to the current sys.stderr, which a progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
