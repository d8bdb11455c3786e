"""`fsdptrain --nproc-per-node N`: ranks on this machine under torch's elastic agent, which runs in this process."""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsdptrain.config import Config
from fsdptrain.cores import usable_cores
from fsdptrain.errors import ConfigError, FsdptrainError
from fsdptrain.launch.failures import Failure, root_cause
from fsdptrain.launch.stop import ForwardStop
from fsdptrain.rank_variables import LAUNCHER_PID, OUR_RESTART_COUNT

_SHUTDOWN_TIMEOUT_S = 10  # [s] between SIGTERM and SIGKILL


def start_ranks(config: Config, argv: Sequence[str], *, nproc: int, module: str = "fsdptrain") -> int:
    """Run `python -m <module> <argv>` on `nproc` ranks, up to 1 + --max-restarts times. Returns the exit code.

    Reports the failure that ended the last attempt: raises FsdptrainError, or writes a traceback to stderr.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_TIMEOUT_S))
    launch, command = config.launch, ["-m", module, *argv]
    stop = ForwardStop(grace_period=launch.grace_period)
    logging.disable(logging.CRITICAL)  # the agent's table of failures; one line is reported instead
    try:
        with tempfile.TemporaryDirectory(prefix="fsdptrain-") as scratch, stop:
            logs = _open_logs(launch.log_dir, scratch)
            failure = _run_attempts(command, logs, nproc, launch.max_restarts, stop)
    except SignalException as error:
        return 128 + (stop.signal or int(error.sigval))
    finally:
        logging.disable(logging.NOTSET)
    if stop.signal is not None and (failure is None or not failure.is_reported):
        return 128 + stop.signal
    if failure is None:
        return 0
    if failure.exit_code == 2:
        raise FsdptrainError(failure.text)
    sys.stderr.write(f"fsdptrain: {failure.text}\n")
    return failure.exit_code


def _run_attempts(
    command: Sequence[str], logs: DefaultLogsSpecs, nproc: int, max_restarts: int, stop: ForwardStop
) -> Failure | None:
    """Run until success or the last allowed attempt. Returns None if the last attempt succeeded."""
    config = _launch_config(nproc, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", logs)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    attempt = 0
    while True:
        os.environ[OUR_RESTART_COUNT] = str(attempt)  # the agent treats every attempt as the first
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            failure = root_cause(error.failures)
        else:
            return None
        if attempt == max_restarts or not failure.restartable or stop.signal:
            return failure
        attempt += 1
        sys.stderr.write(f"fsdptrain: {failure.text}; restart {attempt} of {max_restarts}\n")


def _launch_config(nproc: int, run_id: str, logs: LogsSpecs) -> LaunchConfig:
    handled = ["SIGHUP"] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=run_id,
        role="",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,  # restarts are in `_run_attempts`: the agent would also restart after user errors
        monitor_interval=0.1,
        logs_specs=logs,
        log_line_prefix_template="${role_name}",  # empty
        signals_to_handle=",".join(handled),  # SIGINT and SIGTERM: `ForwardStop`
    )


def _open_logs(log_dir: str | None, scratch: str) -> DefaultLogsSpecs:
    """Open log destinations. --log-dir receives all output; the console also shows rank 0."""
    if log_dir is None:
        return DefaultLogsSpecs(scratch)
    try:
        os.makedirs(log_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise ConfigError(f"--log-dir {log_dir} cannot be written ({error.strerror}): choose another folder") from None
    return DefaultLogsSpecs(log_dir, redirects=Std.ALL, tee={0: Std.ALL})
