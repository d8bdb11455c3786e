"""The process that watches the ranks of one machine, from outside: started, ended, and killed where it does not end."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType

import psutil

TERMINATES = 10.0  # [s] for ranks to end by themselves after SIGTERM
_LEAVES = TERMINATES + 5.0  # [s] for the process that watches them
_PR_SET_PDEATHSIG = 1  # prctl(2)
_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Round:
    """What is started on each machine at the same time."""

    module: str
    argv: list[str]
    nproc: int
    nnodes: int
    node: int
    endpoint: str  # host:port of a store on node 0, a fresh one: out of an old one ranks could read old addresses
    timeout: int  # [s]
    directory: str  # for what goes wrong
    logs: str | None  # folder of the ranks' output


class Agent:
    """`python -m fsdptrain.launch.agent`, in a session of its own."""

    def __init__(self, work: Round, variables: dict[str, str]) -> None:
        command = [sys.executable, "-m", "fsdptrain.launch.agent", json.dumps(asdict(work))]
        self._process = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)

    def ended(self) -> int | None:
        """Its exit code, once there is one."""
        return self._process.poll()

    def end(self, wait: Callable[[], object]) -> None:
        """SIGTERM; after a deadline SIGKILL for it and all that it has started. `wait` takes a moment."""
        if self.ended() is not None:
            return
        self._process.terminate()
        deadline = time.monotonic() + _LEAVES
        while self.ended() is None and time.monotonic() < deadline:
            wait()
        if self.ended() is None:
            self.kill()

    def kill(self) -> None:
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        self._process.kill()
        self._process.wait()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


class Signalled(BaseException):
    """This process was asked to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signal = signal.Signals(signum)


@contextmanager
def signals_raised() -> Iterator[None]:
    """Signalled in place of the end of this process, once."""

    def end(signum: int, frame: FrameType | None) -> None:
        for other in _END:
            signal.signal(other, signal.SIG_IGN)  # there is something to clean up now
        raise Signalled(signum)

    before = {signum: signal.signal(signum, end) for signum in _END}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def end_with_parent(how: signal.Signals) -> None:
    """No orphans when the starting process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)


def set_defaults(**variables: str) -> None:
    """Environment variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
