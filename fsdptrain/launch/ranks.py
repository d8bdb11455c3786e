"""Training as one of several ranks, and error handling of ranks."""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from types import TracebackType
from typing import NoReturn

import fsdptrain
from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.distributed import gather, is_lost_connection
from fsdptrain.errors import ConfigError, RankError
from fsdptrain.launch.failures import failure_of, report_failure
from fsdptrain.launch.process import configure_logging, train
from fsdptrain.rank_variables import has_fsdptrain_launcher


def run_as_rank(config: Config, rank: int, work: Callable[[], None] | None = None) -> int:
    """Train, or run `work`, as one of several ranks. An error ends this process without cleanup."""
    configure_logging(rank=rank)
    end = _EndRankOnError(rank)
    group = platform.process_group(config.launch.dist_timeout)
    with end, group, end:  # inner: before the group closes, which may wait for other ranks
        require_same_options(config)
        code = train(config) if work is None else work() or 0
    return 0 if has_fsdptrain_launcher() else code  # which would end ranks that still close; it knows of the signal


def require_same_options(config: Config) -> None:
    """Compare versions and options of all ranks. Collective. Raises ConfigError on all ranks if they differ."""
    where = f"rank {os.environ['RANK']} ({socket.gethostname()})"
    versions = {package: version(package) for package in ("torch", "transformers")}
    ours = {"Python": sys.version.split()[0], "fsdptrain": fsdptrain.__version__, **versions}
    ours |= {key.flag: str(key.value(config)) for key in all_keys().values() if key.flag != "--nproc-per-node"}
    if text := difference(gather((where, ours))):
        raise ConfigError(f"all ranks must have the same versions and options: {text}")


def difference(ranks: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Describe the first difference between the first rank and another one; "" if there are none."""
    (first, ours), *others = ranks
    for name, theirs in others:
        for what in [*ours, *theirs]:
            if ours.get(what) != theirs.get(what):
                return f"{what} is {ours.get(what)} on {first} and {theirs.get(what)} on {name}"
    return ""


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
        if isinstance(error, RankError) and error.__cause__ is not None:
            error = error.__cause__  # has the call that waited
        failure = failure_of(error, self.rank, lost_connection=is_lost_connection(error))
        report_failure(failure)
        _end(failure.exit_code)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
