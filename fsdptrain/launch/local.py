"""`fsdptrain --nproc-per-node N`: ranks on this machine under torch's elastic agent, which runs in this process."""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsdptrain.cores import usable_cores
from fsdptrain.errors import FsdptrainError
from fsdptrain.launch.failures import root_cause
from fsdptrain.rank_variables import LAUNCHER_PID
from fsdptrain.signals import heeded, stop_signals

_SHUTDOWN_TIMEOUT_S = 10  # [s] between SIGTERM and SIGKILL


def start_ranks(argv: Sequence[str], *, nproc: int, module: str = "fsdptrain") -> int:
    """Run `python -m <module> <argv>` on `nproc` ranks. Returns the exit code.

    Passes the first SIGINT or SIGTERM on to the ranks as SIGINT: they stop after the current step. A second one ends
    the ranks, and so does the first if there are no ranks yet. Reports the failure that ended the run: raises
    FsdptrainError, or writes a traceback to stderr.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_TIMEOUT_S))
    os.environ[LAUNCHER_PID] = str(os.getpid())
    stopped_by, failure = list[int](), None

    def forward(number: int) -> None:
        stopped_by.append(number)
        ranks = psutil.Process().children()
        if not ranks:
            _end_ranks()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):  # it has just ended, on which the agent acts
                rank.send_signal(signal.SIGINT)

    logging.disable(logging.CRITICAL)  # the agent's table of failures; one line is reported instead
    try:
        with tempfile.TemporaryDirectory(prefix="fsdptrain-") as scratch:
            launch = elastic_launch(_launch_config(nproc, scratch), sys.executable)
            with stop_signals(heeded(), first=forward, again=_end_ranks):
                launch("-m", module, *argv)
    except ChildFailedError as error:
        failure = root_cause(error.failures)
    except SignalException as error:
        return _ended_by(stopped_by[0] if stopped_by else int(error.sigval))
    finally:
        logging.disable(logging.NOTSET)
    if stopped_by and (failure is None or not failure.is_reported):
        return _ended_by(stopped_by[0])
    if failure is None:
        return 0
    if failure.exit_code == 2:
        raise FsdptrainError(failure.text)
    sys.stderr.write(f"fsdptrain: {failure.text}\n")
    return failure.exit_code


def _ended_by(number: int) -> int:
    sys.stderr.write(f"fsdptrain: stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}\n")
    return 128 + number


def _end_ranks() -> NoReturn:
    raise SignalException("stopped", sigval=signal.SIGTERM)  # on which the agent ends them


def _launch_config(nproc: int, scratch: str) -> LaunchConfig:
    handled = ["SIGHUP"] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"fsdptrain-{os.getpid()}",
        role="",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(scratch),
        log_line_prefix_template="${role_name}",  # empty
        signals_to_handle=",".join(handled),  # SIGINT and SIGTERM: `stop_signals`
    )
