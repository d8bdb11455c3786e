"""Worker processes that compute a reward. A call that is late or crashes is unscored, and its process is replaced."""

import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe

from fsdptrain.cores import usable_cores
from fsdptrain.errors import RolloutError, describe
from fsdptrain.rewards.calls import Call, Outcome, RewardCalls

_OF_RANK = re.compile(  # variables with which a library in a process would join the ranks
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
_CODE = (
    "import sys; sys.path[:] = sys.argv[3:]; from fsdptrain.rewards.worker import main; main(*map(int, sys.argv[1:3]))"
)


class CannotLoadError(Exception):
    """No process can load the reward."""


class Worker:
    """A process that computes one call at a time, in a process group of its own. The thread that starts it outlives it.

    No process of multiprocessing, which would import the main script again and inherit its variables.
    """

    def __init__(self, reward: bytes, environment: dict[str, str]) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), str(os.getpid()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        with suppress(OSError):  # it has ended
            self._connection.send_bytes(reward)

    def wait_until_loaded(self) -> None:
        with suppress(EOFError, OSError):
            self._connection.recv_bytes()

    def call(self, samples: bytes, timeout: float) -> list[Outcome] | str | None:
        """Return the outcomes, a text for all of them, or None if they are late, which ends the process."""
        try:
            self._connection.send_bytes(samples)
            if self._connection.poll(timeout):
                return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return f"its process ended with {_ending(self.kill())}"
        self.kill()
        return None

    def kill(self) -> int | None:
        """Kill the process and those that it started. Returns its exit code."""
        if self.process.returncode is None:  # else its id may be that of another group
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it waits for a disk or a driver
                self.process.wait(5.0)
        return self.process.returncode


class ProcessPool:
    """Processes that call one reward, each with a thread of the trainer. Any thread may use it."""

    grace = 120.0  # [s] to start a process and import the reward in it

    def __init__(self, reward: RewardCalls, num_workers: int) -> None:
        """Start the processes. Raises CannotLoadError if the reward is no importable object."""
        if getattr(reward.function, "__module__", None) == "__main__":
            raise CannotLoadError("it is defined in the script itself")
        try:
            self._pickled = pickle.dumps(reward)
        except Exception as error:  # objects of the user
            raise CannotLoadError(describe(error)) from error
        self.reward = reward
        self.num_calls = 1 if reward.is_batched else num_workers  # at a time
        self._end = ""  # why no more calls are answered
        self._changing = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Future[list[Outcome]], bytes, int] | None] = queue.SimpleQueue()
        self._workers: dict[int, Worker] = {}
        for index in range(self.num_calls):
            threading.Thread(target=self._serve, args=(index,), daemon=True, name="rewards").start()

    def schedule(self, calls: Sequence[Call]) -> Future[list[Outcome]]:
        """Call the reward once. Raises RolloutError if the processes have ended; the future does too."""
        future: Future[list[Outcome]] = Future()
        try:  # no process gets images
            samples = pickle.dumps(
                [(replace(p, images=None) if p.images is not None else p, text) for p, text in calls]
            )
        except Exception as error:  # noqa: BLE001  # objects of the user
            future.set_result([f"the sample cannot be sent to a process: {describe(error)}"] * len(calls))
            return future
        with self._changing:
            if self._end:
                raise self._ended()
            self._waiting.put((future, samples, len(calls)))
        return future

    def close(self, reason: str = "the run has ended") -> None:
        """Kill the processes. Calls that wait raise RolloutError."""
        with self._changing:
            self._end = self._end or reason
            for worker in self._workers.values():
                worker.kill()
            with suppress(queue.Empty):
                while job := self._waiting.get_nowait():
                    job[0].set_exception(self._ended())
            for _ in range(self.num_calls):
                self._waiting.put(None)

    def abandon(self) -> None:
        self.close("its processes do not start, or do not answer")

    def _serve(self, index: int) -> None:
        """Start a process and pass calls on to it until `close`. One that has ended is replaced at the next call."""
        worker = self._start(index)
        while job := self._waiting.get():
            future, samples, num_samples = job
            if worker is None or worker.process.poll() is not None:
                worker = self._start(index)
            reply = worker.call(samples, self.reward.timeout) if worker else None
            if self._end:
                future.set_exception(self._ended())
            elif isinstance(reply, list):
                future.set_result(reply)
            else:
                text = self.reward.late if reply is None else f"{self.reward.where}: {reply}"
                future.set_result([text] * num_samples)

    def _start(self, index: int) -> Worker | None:
        """Start a process and wait until it has loaded the reward; None after `close`."""
        try:
            with self._changing:
                if self._end:
                    return None
                worker = self._workers[index] = Worker(self._pickled, worker_environment(self.num_calls))
        except OSError as error:
            self.close(f"no process can be started: {error}")
            return None
        worker.wait_until_loaded()
        return worker

    def _ended(self) -> RolloutError:
        return RolloutError(f"{self.reward.where}: {self._end}")


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


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
