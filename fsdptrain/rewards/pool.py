"""Worker processes that compute rewards. One that hangs or dies is replaced, and its call is unscored.

`concurrent.futures` is no alternative: its pool breaks as a whole when a process dies, and cannot kill a call.
"""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from fsdptrain.cores import usable_cores
from fsdptrain.errors import RolloutError, describe
from fsdptrain.rewards.calls import Call, Outcome, RewardCalls
from fsdptrain.rewards.patience import Patience
from fsdptrain.rewards.values import RewardResult
from fsdptrain.types import Prompt

START_S = 120.0  # least time to import the reward in a new process
_OF_RANK = re.compile(  # variables with which a library in a process would join the ranks
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
_CODE = (
    "import sys; sys.path[:] = sys.argv[3:]; from fsdptrain.rewards.worker import main; main(*map(int, sys.argv[1:3]))"
)


class CannotLoadError(Exception):
    """No process can load the reward."""


class Worker:
    """A process that computes one call at a time."""

    def __init__(self, reward: bytes, environment: dict[str, str], timeout: float, *, replaces: bool) -> None:
        self.replaces = replaces  # another process, which has ended
        self.job: list[int] = []  # samples of the current call
        self.ready = False
        self.since = time.monotonic()  # of the start, or of the current call
        self.deadline = self.since + timeout
        self._reply = b""
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(timeout)  # of sending
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, str(theirs.fileno()), str(os.getpid()), *sys.path],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # a process group, to kill the processes of the reward too
                )
        except OSError:
            self.connection.close()
            raise
        with suppress(OSError):  # it has ended; `receive` reports that
            self.connection.sendall(reward)

    def send(self, job: list[int], samples: Sequence[bytes], timeout: float) -> None:
        self.job, self.since = job, time.monotonic()
        self.deadline = self.since + timeout
        self.connection.sendall(pickle.dumps(samples))

    def receive(self) -> Any:
        """Return a reply, or None if it is incomplete. Raises OSError if the process has ended."""
        if not (data := self.connection.recv(1 << 16)):
            raise ConnectionResetError
        self._reply += data
        if not self._reply.endswith(b"\n"):
            return None
        reply, self._reply = json.loads(self._reply), b""
        return reply

    def kill(self) -> str:
        """Kill the process group. Returns how the process has ended. A thread that waits for the process wakes up."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        if self._process.returncode is None:  # else its id may be that of another process
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it waits for a disk or a driver
                self._process.wait(5.0)
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exit code {code}"
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"


class ProcessPool:
    """Processes that call one reward. One `run` at a time; `close` may be called meanwhile, from another thread."""

    def __init__(self, reward: RewardCalls, num_workers: int) -> None:
        """Start the processes, which import the reward meanwhile. Raises CannotLoadError if they cannot."""
        if getattr(reward.function, "__module__", None) == "__main__":
            raise CannotLoadError("it is defined in the script itself")
        self.reward = reward
        self.num_workers = 1 if reward.is_batched else num_workers
        self._workers: list[Worker] = []
        self._loads = False  # a process has loaded the reward
        self._closed = False
        self._running, self._changing = threading.Lock(), threading.RLock()
        try:
            self._pickled = pickle.dumps(reward)
        except Exception as error:  # objects of the user
            raise CannotLoadError(describe(error)) from error
        self._environment = worker_environment(self.num_workers)
        self._start()

    def close(self) -> None:
        """Kill the processes. A `run` in another thread raises RolloutError."""
        with self._changing:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        with self._running:
            for worker in self._workers:
                worker.connection.close()
            self._workers = []

    def run(self, calls: Sequence[Call], patience: Patience) -> list[Outcome]:
        """Score the samples, in order.

        Raises RolloutError if `patience` ends or no process can be started, and CannotLoadError if none can load the
        reward.
        """
        outcomes: dict[int, Outcome] = {}
        samples = [_pickled(*call) for call in calls]
        outcomes |= {index: sample for index, sample in enumerate(samples) if isinstance(sample, str)}
        waiting = deque(self.reward.jobs([index for index in range(len(calls)) if index not in outcomes]))
        with self._running:
            try:
                self._start()
                for worker in self._workers:  # one that was started earlier has cost this rollout no time
                    worker.since = time.monotonic()
                while len(outcomes) < len(calls):
                    self._send(waiting, samples)
                    busy = [worker for worker in self._workers if worker.job or not worker.ready]
                    first = min(worker.deadline for worker in busy)
                    readable = wait([worker.connection for worker in busy], max(0.0, first - time.monotonic()))
                    for worker in busy:
                        self._continue(worker, worker.connection in readable, calls, outcomes, patience)
            except BaseException:
                for worker in [worker for worker in self._workers if worker.job]:
                    self._remove(worker)  # its answer would belong to this rollout
                raise
        return [outcomes[index] for index in range(len(calls))]

    def _send(self, waiting: "deque[list[int]]", samples: Sequence[Any]) -> None:
        """Send calls to idle processes."""
        for worker in [worker for worker in self._workers if worker.ready and not worker.job]:
            if not waiting:
                return
            try:
                worker.send(waiting[0], [samples[index] for index in waiting[0]], self.reward.timeout)
            except OSError:  # it ended while it was idle
                self._remove(worker)
                self._start()
            else:
                waiting.popleft()

    def _continue(
        self, worker: Worker, has_data: bool, calls: Sequence[Call], outcomes: dict[int, Outcome], patience: Patience
    ) -> None:
        """Read the answer of a process. Replace the process if it has ended or is late."""
        try:
            reason = self._read(worker, has_data, outcomes, patience)
        except OSError:
            reason = f"{self.reward.where}: its process ended with {worker.kill()}"
        if not reason:
            return
        self._remove(worker)
        if not (self._loads or self._workers or self._closed):
            raise RolloutError(f"{self.reward.where}: a process that imports it does not start: {reason}")
        outcomes |= dict.fromkeys(worker.job, reason)
        if worker.job:
            patience.record([calls[worker.job[0]]], None, reason, self._share(worker))
        elif self._loads:
            patience.lose(reason, self._share(worker))
        if worker.ready or not self._workers:  # after a failed start, the other processes go on
            self._start()

    def _read(self, worker: Worker, has_data: bool, outcomes: dict[int, Outcome], patience: Patience) -> str:
        """Return why the process must be replaced, or an empty string. Raises OSError if it has ended."""
        reply = worker.receive() if has_data else None
        if reply is None:
            is_late = not has_data and time.monotonic() >= worker.deadline
            return is_late * (
                self.reward.late if worker.ready else f"{self.reward.where}: a process did not start in time"
            )
        if worker.ready:
            outcomes |= zip(worker.job, map(_outcome, reply), strict=True)
            worker.job = []
            patience.answered()
            return ""
        if reply and not self._loads:
            raise CannotLoadError(reply)
        if not reply:
            if worker.replaces:
                patience.lose("", self._share(worker))
            elif not self._loads:
                patience.answered()
            worker.ready = self._loads = True
        return reply

    def _share(self, worker: Worker) -> float:
        return (time.monotonic() - worker.since) / self.num_workers

    def _start(self) -> None:
        """Start the missing processes."""
        with self._changing:
            if self._closed:
                raise RolloutError(f"{self.reward.where}: the run has ended")
            while len(self._workers) < self.num_workers:
                try:
                    worker = Worker(
                        self._pickled, self._environment, max(START_S, self.reward.timeout), replaces=self._loads
                    )
                except OSError as error:
                    if self._workers:
                        return
                    raise RolloutError(f"{self.reward.where}: no process can be started: {error}") from error
                self._workers.append(worker)

    def _remove(self, worker: Worker) -> None:
        with self._changing:
            self._workers.remove(worker)
            worker.kill()
            worker.connection.close()


def worker_environment(num_workers: int) -> dict[str, str]:
    """Return the variables of the processes of a rank. They share its threads, and see its GPU only, as device 0."""
    threads = (os.environ.get("OMP_NUM_THREADS") or str(usable_cores())).partition(",")[0]
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(rank + 1)))).split(",")
    return {
        **{name: value for name, value in os.environ.items() if not _OF_RANK.fullmatch(name)},
        "OMP_NUM_THREADS": str(max(1, int(threads) // num_workers)),
        "CUDA_VISIBLE_DEVICES": devices[min(rank, len(devices) - 1)],
        "PYTHONHASHSEED": "0",  # else rewards that depend on the order of a set would differ within a group
    }


def _pickled(prompt: Prompt, response: str) -> bytes | str:
    """Pickle a sample without its images. Returns the reason if that fails."""
    try:
        return pickle.dumps((prompt if prompt.images is None else replace(prompt, images=None), response))
    except Exception as error:  # noqa: BLE001  # objects of the user
        return f"the sample cannot be sent to a process: {describe(error)}"


def _outcome(reply: Any) -> Outcome:
    return reply if isinstance(reply, str) else RewardResult(*reply)
