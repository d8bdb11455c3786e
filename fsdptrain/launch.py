"""Processes: one in place, or one for each device under torch's elastic agent, and how their errors end the run.

    fsdptrain ...                    one device: trains in this process
    fsdptrain --nproc-per-node 8     starts `python -m fsdptrain` eight times, on each machine of --nnodes
    torchrun ... -m fsdptrain        the ranks are there already: trains as one of them

An error of any rank ends all of them and is shown once, by the process that started them.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsdptrain import platform
from fsdptrain.config import Config, check_processes, check_world_size
from fsdptrain.errors import FsdptrainError, RankError

_FAILURES = "FSDPTRAIN_FAILURES"  # folder in which ranks leave their errors for the process that started them
_PR_SET_PDEATHSIG = 1  # prctl(2)
_RANK_0_FIRST = 2.0  # [s]
_OTHERS_LEAVE = 10.0  # [s] after the ranks of all nodes have ended


def run(config: Config, argv: Sequence[str]) -> int:
    """Train on all processes that `config.launch` asks for; the exit code. `argv` is what each of them is given."""
    if "RANK" in os.environ:
        return run_as_rank(config, lambda: _train(config))
    nproc = config.launch.nproc_per_node or max(1, torch.accelerator.device_count())
    if nproc * config.launch.nnodes > 1:
        check_world_size(config, nproc * config.launch.nnodes)
        return start_ranks(config, argv, nproc=nproc)
    _quieten(rank=0)
    with distributed(config):
        _train(config)
    return 0


@contextmanager
def distributed(config: Config) -> Iterator[None]:
    """The process group of a run: of torchrun's ranks, or of this process alone. ConfigError where it does not fit.

    A group that exists already is used and left as it is.
    """
    world_size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_processes(config, world_size=world_size, local_world_size=local)
    with platform.process_group(config.launch.dist_timeout):
        yield


def _train(config: Config) -> None:
    from fsdptrain.trainer import Trainer  # after the environment is set

    Trainer(config).fit()


def run_as_rank(config: Config, work: Callable[[], None]) -> int:
    """Do `work` as one of several ranks. An error ends this process at once: the others may never reach a clean end."""
    rank = int(os.environ["RANK"])
    _quieten(rank=rank)
    if _FAILURES in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # no orphans when the starting process is killed
    end = _EndRankOnError(rank)
    with end, distributed(config), end:  # the inner one: before the group is torn down, where others may be waiting
        work()
    return 0


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
        failure = _failure(error, self.rank)
        directory = os.environ.get(_FAILURES)
        if directory is not None:
            failure.write(Path(directory))
        elif not failure.echo or self.rank == 0:
            if failure.mendable and self.rank != 0:
                time.sleep(_RANK_0_FIRST)  # what all ranks know is said once: torchrun ends the others with rank 0
            sys.stderr.write(failure.line() if failure.mendable else failure.text)
        _end(2 if failure.mendable else 1)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True)
class _Failure:
    """Why a rank ended."""

    rank: int
    time: float  # [s] since the epoch
    text: str  # the message, or the traceback
    mendable: bool  # an FsdptrainError
    echo: bool  # only says that another rank failed

    def line(self) -> str:
        return f"fsdptrain: {self.text}\n"

    def write(self, directory: Path) -> None:
        half = directory / f".rank{self.rank}"
        half.write_text(json.dumps(vars(self)))
        half.rename(directory / f"rank{self.rank}.json")


def _failure(error: BaseException, rank: int) -> _Failure:
    mendable = isinstance(error, FsdptrainError)
    text = str(error) if mendable else "".join(traceback.format_exception(error))
    return _Failure(rank, time.time(), text, mendable, isinstance(error, RankError))


def start_ranks(config: Config, argv: Sequence[str], *, nproc: int, module: str = "fsdptrain") -> int:
    """Run `python -m <module> <argv>` on `nproc` ranks of this machine and wait for them; the exit code.

    The first error is shown once: raised where a user can mend it, else written to stderr with its traceback.
    """
    _set_defaults(
        OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // nproc)),
        TORCH_CPP_LOG_LEVEL="ERROR",
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="10",  # [s] for ranks to end by themselves after one failed
    )
    with tempfile.TemporaryDirectory(prefix="fsdptrain-") as directory, _silent_agent():
        os.environ[_FAILURES] = directory
        try:
            with _endpoint_lasts(config):
                elastic_launch(_elastic_config(config, nproc), sys.executable)("-m", module, *argv)
        except ChildFailedError as error:
            return _show(_failures(Path(directory)), error)
        except SignalException as error:
            return 128 + int(error.sigval)
        finally:
            del os.environ[_FAILURES]
    return 0


def _elastic_config(config: Config, nproc: int) -> LaunchConfig:
    launch = config.launch
    several = launch.nnodes > 1
    return LaunchConfig(
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        nproc_per_node=nproc,
        run_id="fsdptrain",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=launch.rdzv_endpoint or "127.0.0.1:0",
        rdzv_configs={"rank": launch.node_rank, "timeout": launch.dist_timeout} if several else {},
        local_addr=None if several else "127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )


@contextmanager
def _endpoint_lasts(config: Config) -> Iterator[None]:
    """Node 0, where the rendezvous is, leaves last: else the agents of other nodes may find it gone as they leave."""
    launch = config.launch
    if launch.nnodes == 1:
        yield
        return
    host, port = parse_rendezvous_endpoint(launch.rdzv_endpoint, 0)
    first = launch.node_rank == 0
    timeout = timedelta(seconds=launch.dist_timeout)
    try:
        store = TCPStore(host, port, None, first, timeout, wait_for_workers=False, multi_tenant=True)  # the agent's too
        yield
    except DistError as error:
        raise RankError(
            f"the {launch.nnodes} machines of --nnodes did not meet at --rdzv-endpoint {launch.rdzv_endpoint} within"
            f" {launch.dist_timeout} s (--dist-timeout): {_first_line(error)} Is node 0 there, each --node-rank"
            " given once, and the port open?"
        ) from None
    if not first:
        store.set(f"left/{launch.node_rank}", "")
        return
    with suppress(DistError):  # another node may have been killed after its work was done
        store.wait([f"left/{node}" for node in range(1, launch.nnodes)], timedelta(seconds=_OTHERS_LEAVE))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _failures(directory: Path) -> list[_Failure]:
    """What the ranks of this machine left, the cause first: what only echoes another rank comes last."""
    found = [_Failure(**json.loads(path.read_text())) for path in directory.glob("rank*.json")]
    return sorted(found, key=lambda failure: (failure.echo, failure.time))


def _show(failures: list[_Failure], error: ChildFailedError) -> int:
    for rank, process in error.failures.items():
        if process.exitcode < 0 and process.exitcode != -signal.SIGTERM:  # SIGTERM: sent by the agent to the others
            name = signal.Signals(-process.exitcode).name
            hint = "; the host may be out of memory: see dmesg, use fewer --nproc-per-node" if name == "SIGKILL" else ""
            raise RankError(f"rank {rank} was killed by {name}{hint}") from None
    told = {failure.rank for failure in failures}
    silent = [(rank, process) for rank, process in error.failures.items() if process.exitcode > 0 and rank not in told]
    if silent or not failures:  # the errors of the others only say that this one is gone
        rank, process = silent[0] if silent else error.get_first_failure()
        if process.exitcode != 2:  # 2: the rank has said what was wrong with its command line
            sys.stderr.write(f"fsdptrain: rank {rank} ended with exit code {process.exitcode} and left no error\n")
        return process.exitcode
    first = failures[0]
    if first.mendable:
        raise FsdptrainError(first.text)
    sys.stderr.write(f"fsdptrain: rank {first.rank} failed\n{first.text}")
    return 1


@contextmanager
def _silent_agent() -> Iterator[None]:
    """Without the agent's own log: what it says of a failed rank is a table, and our line says it already."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _quieten(*, rank: int) -> None:
    """Rank 0 speaks, and only of this program. What the user has set in the environment stays."""
    _set_defaults(TRANSFORMERS_VERBOSITY="error", DATASETS_VERBOSITY="error")
    log = logging.getLogger("fsdptrain")
    log.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not log.handlers:
        log.addHandler(_CurrentStderr())
    if rank != 0:
        _set_defaults(HF_HUB_DISABLE_PROGRESS_BARS="1")
        warnings.simplefilter("ignore")


class _CurrentStderr(logging.Handler):
    """Writes to whatever sys.stderr is now, so that lines appear above a progress bar and not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


def _set_defaults(**variables: str) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
