"""One of the ranks, whoever has started them: its process group, and how an error ends it."""

import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

from torch.distributed import DistError

from fsdptrain import platform
from fsdptrain.config import Config, check_own_launch, check_processes
from fsdptrain.distributed import gather
from fsdptrain.errors import ConfigError, FsdptrainError, RankError, RolloutError
from fsdptrain.launch.alike import describe, difference, digest
from fsdptrain.launch.failures import Failure, Level, is_told
from fsdptrain.launch.processes import end_with_parent, set_defaults

_RANK_0_FIRST = 2.0  # [s]
_GONE = ("closed by peer", "reset by peer", "Timed out waiting", "Connection refused", "Broken pipe")  # gloo, in C++


def run_alone(config: Config) -> int:
    """Train in this process."""
    quieten(rank=0)
    with distributed(config):
        _train(config)
    return 0


def run_as_rank(config: Config, work: Callable[[], None] | None = None) -> int:
    """Train, or do `work`, as one of several ranks. An error ends this process at once: the others may never reach a
    clean end."""
    rank = int(os.environ["RANK"])
    quieten(rank=rank)
    if is_told() is not None:
        end_with_parent(signal.SIGTERM)
    end = _EndRankOnError(rank)
    with end, distributed(config), end:  # the inner one: before the group is torn down, where others may be waiting
        _require_alike(config)
        work() if work is not None else _train(config)
    return 0


@contextmanager
def distributed(config: Config) -> Iterator[None]:
    """The process group of a run: of torchrun's ranks, or of this process alone. ConfigError where it does not fit.

    A group that exists already is used and left as it is.
    """
    world_size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_processes(config, world_size=world_size, local_world_size=local)
    if is_told() is None:
        check_own_launch(config)
    with platform.process_group(config.launch.dist_timeout):
        yield


def _train(config: Config) -> None:
    from fsdptrain.trainer import Trainer  # after the environment is set

    Trainer(config).fit()


def _require_alike(config: Config) -> None:
    """Where a scheduler has started the ranks nobody else compares what the machines have. Collective."""
    found = describe(config, nproc=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if len(set(gather(digest(found)))) > 1:
        where = f"node {os.environ.get('GROUP_RANK', '?')} ({socket.gethostname()})"
        raise ConfigError(str(difference(gather((where, found)))))


class _EndRankOnError:
    """Leaves the error for the starting process (under a torchrun of the user: on stderr) and ends this process.

    Nothing after it is run: to tear down the process group could wait for ranks that are gone, and would end the others
    with errors of their own before this one is known.
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
        failure = failure_of(error, self.rank)
        directory = is_told()
        if directory is not None:
            failure.write(directory)
        elif failure.level != Level.ECHO or self.rank == 0:
            if failure.mendable and self.rank != 0:
                time.sleep(_RANK_0_FIRST)  # what all ranks know is said once: torchrun ends the others with rank 0
            sys.stderr.write(failure.line() if failure.mendable else failure.text)
        _end(2 if failure.mendable else 1)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def failure_of(error: BaseException, rank: int) -> Failure:
    mendable = isinstance(error, FsdptrainError)
    text = str(error) if mendable else "".join(traceback.format_exception(error))
    again = not mendable or isinstance(error, RankError | RolloutError)  # what a user must mend does not mend itself
    return Failure(rank, time.time(), text, mendable, _level(error), again)


def _level(error: BaseException) -> Level:
    if isinstance(error, RankError):
        return Level.ECHO
    gone = isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE)
    return Level.LOST if gone or isinstance(error, DistError) else Level.OWN


def quieten(*, rank: int) -> None:
    """Rank 0 speaks, and only of this program. What the user has set in the environment stays."""
    set_defaults(TRANSFORMERS_VERBOSITY="error", DATASETS_VERBOSITY="error")
    log = logging.getLogger("fsdptrain")
    log.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not log.handlers:
        log.addHandler(_CurrentStderr())
    if rank != 0:
        set_defaults(HF_HUB_DISABLE_PROGRESS_BARS="1")
        warnings.simplefilter("ignore")


class _CurrentStderr(logging.Handler):
    """Writes to whatever sys.stderr is now, so that lines appear above a progress bar and not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
