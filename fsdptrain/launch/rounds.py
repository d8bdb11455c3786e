"""Rounds of ranks: all machines start them together, and after a failure once more, from the newest checkpoint."""

import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fsdptrain.config import Config
from fsdptrain.errors import FsdptrainError
from fsdptrain.launch.addresses import interface_of
from fsdptrain.launch.alike import describe
from fsdptrain.launch.cores import usable_cores
from fsdptrain.launch.failures import FAILURES, Report, read_report
from fsdptrain.launch.meeting import Go, Meeting, Terms, meet
from fsdptrain.launch.processes import TERMINATES, Agent, Round, Signalled, signals_raised
from fsdptrain.registry import suggest


def start_ranks(config: Config, argv: Sequence[str], *, nproc: int, module: str = "fsdptrain") -> int:
    """Run `python -m <module> <argv>` on `nproc` ranks of this machine and wait for them; the exit code.

    The first error is shown once, on each machine: raised where a user can mend it, else written to stderr with its
    traceback.
    """
    with signals_raised():
        try:
            meeting = meet(_terms(config, nproc))
            return _Rounds(config, argv, nproc, module, meeting).run()
        except Signalled as error:
            return 128 + error.signal


class _Rounds:
    def __init__(self, config: Config, argv: Sequence[str], nproc: int, module: str, meeting: Meeting) -> None:
        self._config = config
        self._argv = list(argv)
        self._nproc = nproc
        self._module = module
        self._meeting = meeting

    def run(self) -> int:
        why = "has ended"
        try:
            while True:
                go = self._meeting.gather()
                verdict = self._meeting.settle(self._round(go))
                if verdict is None:
                    return 0
                if not verdict.again:
                    return _show(verdict.cause)
                max_restarts = self._config.launch.max_restarts
                sys.stderr.write(f"fsdptrain: {verdict.cause.text}; restart {go.round + 1} of {max_restarts}\n")
        except Signalled as error:
            why = f"was ended by {error.signal.name}"
            raise
        finally:
            self._meeting.leave(why)

    def _round(self, go: Go) -> Report | None:
        """Of this machine: why its ranks ended; None: well."""
        problem = _unknown_interface(self._config.launch.network_interface)
        if problem is not None:  # said here, so that the other machines hear of it
            return Report(problem, again=False)
        with tempfile.TemporaryDirectory(prefix="fsdptrain-") as directory:
            agent = Agent(self._work(go, directory), self._variables(go, directory))
            stop = False
            try:
                while agent.ended() is None and not stop:
                    stop = self._meeting.tick()
                agent.end(self._meeting.tick)
            except BaseException:
                agent.end(lambda: time.sleep(0.1))
                raise
            code = agent.ended()
            if code == 0:
                return None
            return read_report(Path(directory), code or 0, stopped=stop)

    def _work(self, go: Go, directory: str) -> Round:
        launch = self._config.launch
        return Round(
            module=self._module,
            argv=self._argv_of(go),
            nproc=self._nproc,
            nnodes=launch.nnodes,
            node=launch.node_rank,
            endpoint=go.endpoint,
            timeout=launch.dist_timeout,
            directory=directory,
            logs=launch.log_rank_dir and str(Path(launch.log_rank_dir) / f"{go.launch}.{go.round}"),
        )

    def _argv_of(self, go: Go) -> list[str]:
        """A run that has begun goes on, whatever was to happen at its start. A checkpoint that it was taken back to
        stays what it goes on from until there is another."""
        resume = self._config.run.resume
        begun = go.round > 0 and (resume == "never" or (resume != "auto" and go.saved))
        return [*self._argv, "--resume", "auto"] if begun else self._argv

    def _variables(self, go: Go, directory: str) -> dict[str, str]:
        interface = self._config.launch.network_interface
        defaults = {
            "OMP_NUM_THREADS": str(max(1, usable_cores() // self._nproc)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{TERMINATES:.0f}",
        }
        nearest = interface or interface_of(go.address)
        if nearest is not None:  # gloo asks for the host name, which is often that of the loopback device
            defaults["GLOO_SOCKET_IFNAME"] = nearest
        if interface is not None:
            defaults["NCCL_SOCKET_IFNAME"] = interface
        found = {name: value for name, value in defaults.items() if name not in os.environ}
        return {**found, FAILURES: directory, "FSDPTRAIN_LAUNCH": go.launch}


def _show(cause: Report) -> int:
    if cause.code == 2 and cause.text:
        raise FsdptrainError(cause.text)
    if cause.text:
        sys.stderr.write(f"fsdptrain: {cause.text}\n")
    return cause.code


def _terms(config: Config, nproc: int) -> Terms:
    launch = config.launch
    host, _, port = (launch.rdzv_endpoint or "127.0.0.1:0").rpartition(":")
    return Terms(
        node=launch.node_rank,
        nnodes=launch.nnodes,
        endpoint=(host.strip("[]"), int(port)),
        meets_s=launch.dist_timeout,
        silence_s=launch.node_timeout,
        max_restarts=launch.max_restarts,
        launch=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
        name=f"{socket.gethostname()}:{os.getpid()}",
        description=describe(config, nproc=nproc) if launch.nnodes > 1 else {},
        newest=partial(_newest, Path(config.run.output_dir) / "checkpoints"),
    )


def _newest(folder: Path) -> str:
    """Without torch, and so not by `CheckpointFolder`: by the step, then by the attempt at it."""
    names = (path.name for path in folder.glob("step_*"))
    return max(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)], default="")


def _unknown_interface(name: str | None) -> str | None:
    known = [found for _, found in socket.if_nameindex()]
    if name is None or name in known:
        return None
    return f"--network-interface {name} is not on this machine{suggest(name, known)} (it has {', '.join(known)})"
