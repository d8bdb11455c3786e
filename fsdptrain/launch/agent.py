"""`python -m fsdptrain.launch.agent <what, as JSON>`: the ranks of this machine, once, under torch's elastic agent.

A process of its own, as `torchrun` is: where the connection to another machine is cut it can hang in C++, deaf to
SIGTERM (seen with torch 2.13), so whoever started it must be able to kill it.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsdptrain.launch.failures import AGENT, Failure, Level
from fsdptrain.launch.processes import Round, end_with_parent


def start(work: Round) -> int:
    """The exit code; what the ranks ended with is left in `work.directory`."""
    try:
        elastic_launch(_config(work), sys.executable)("-m", work.module, *work.argv)
    except ChildFailedError as error:
        _leave(work, {rank: process.exitcode for rank, process in error.failures.items()})
        return 1
    except SignalException as error:
        _leave(work, {})
        return 128 + int(error.sigval)
    except (DistError, RendezvousError) as error:
        reason = str(error).partition("\n")[0]
        text = f"node {work.node} did not reach the others at {work.endpoint}: {reason}"
        Failure(-1, time.time(), text, True, Level.LOST).write(Path(work.directory))
        _leave(work, {})
        return 1
    return 0


def _leave(work: Round, codes: Mapping[int, int]) -> None:
    (Path(work.directory) / AGENT).write_text(json.dumps(codes))


def _config(work: Round) -> LaunchConfig:
    several = work.nnodes > 1
    return LaunchConfig(
        min_nodes=work.nnodes,
        max_nodes=work.nnodes,
        nproc_per_node=work.nproc,
        logs_specs=_RankLogs(work.directory, work.logs),
        run_id="fsdptrain",
        role="",
        log_line_prefix_template="${role_name}",  # nothing
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=work.endpoint if several else "127.0.0.1:0",
        rdzv_configs={"rank": work.node, "timeout": work.timeout} if several else {},
        local_addr=None if several else "127.0.0.1",
        max_restarts=0,  # rounds.py starts again: all machines at once, each time with a fresh store
        monitor_interval=0.1,
    )


class _RankLogs(LogsSpecs):
    """Output to `<logs>/rank_00003.out` and `.err`; that of rank 0 to the console too."""

    def __init__(self, directory: str, logs: str | None) -> None:
        super().__init__()
        self._default = DefaultLogsSpecs(directory)
        self._logs = logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        default = self._default.reify(envs)
        if self._logs is None:
            return default
        os.makedirs(self._logs, exist_ok=True)
        files = {local: f"{self._logs}/rank_{int(env['RANK']):05d}" for local, env in envs.items()}
        out, err = ({local: f"{path}.{end}" for local, path in files.items()} for end in ("out", "err"))
        first = [local for local, env in envs.items() if env["RANK"] == "0"]
        tee_out, tee_err = ({local: paths[local] for local in first} for paths in (out, err))
        return replace(default, stdouts=out, stderrs=err, tee_stdouts=tee_out, tee_stderrs=tee_err)

    @property
    def root_log_dir(self) -> str:
        return self._default.root_log_dir


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)  # the ranks end with this process
    logging.disable(logging.CRITICAL)  # what the agent says of a failed rank is a table, and we say it in a line
    sys.exit(start(Round(**json.loads(sys.argv[1]))))
