"""Training in this process, alone or as a rank, and error handling of ranks."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

from torch.distributed import DistError

from fsdptrain import platform
from fsdptrain.config import Config, check_own_launch, check_processes
from fsdptrain.launch.alike import require_alike
from fsdptrain.launch.failures import failure_of, report_failure
from fsdptrain.launch.parent import is_started_by_us
from fsdptrain.rank_variables import read_rank_variables

_LOST = ("closed by peer", "reset by peer", "Timed out waiting", "Connection refused", "Broken pipe")  # gloo, in C++


def run_alone(config: Config) -> int:
    """Train in this process."""
    quieten(rank=0)
    with process_group(config):
        _train(config)
    return 0


def run_as_rank(config: Config, rank: int, work: Callable[[], None] | None = None) -> int:
    """Train, or run `work`, as one of several ranks. An error ends this process without cleanup."""
    quieten(rank=rank)
    end = _EndRankOnError(rank)
    with end, process_group(config), end:  # inner: before the group closes, which may wait for other ranks
        require_alike(config)
        work() if work is not None else _train(config)
    return 0


@contextmanager
def process_group(config: Config) -> Iterator[None]:
    """Open the process group of a run: torchrun's ranks or this process alone.

    An existing group is reused and left open. Raises ConfigError if the number of ranks does not fit `config`.
    """
    ranks = read_rank_variables()
    sizes = (ranks.world_size, ranks.local_world_size) if ranks else (1, 1)
    check_processes(config, world_size=sizes[0], local_world_size=sizes[1])
    if not is_started_by_us():
        check_own_launch(config)
    with platform.process_group(config.launch.dist_timeout):
        yield


def _train(config: Config) -> None:
    from fsdptrain.trainer import Trainer  # import after `quieten`

    Trainer(config).fit()


class _EndRankOnError:
    """Context manager that reports an error and ends this process immediately.

    Skips cleanup: closing the process group could wait for dead ranks, and would cause errors on other ranks before
    this one is reported.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        if isinstance(error, KeyboardInterrupt):
            _end(130)
        failure = failure_of(error, self.rank, lost_a_rank=_is_lost_connection(error))
        report_failure(failure)
        _end(failure.exit_code)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_lost_connection(error: BaseException) -> bool:
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def quieten(*, rank: int) -> None:
    """Silence other libraries, and log on rank 0 only. Environment variables set by the user are kept."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
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
