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
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe

from fsdptrain.cores import usable_cores
from fsdptrain.errors import RolloutError, describe
from fsdptrain.rewards.calls import Call, LostTime, Outcome, RewardCalls

MAX_WORKERS = 8  # by default; each may import torch or load a model
START_S = 120.0  # to start a process and import the reward in it
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

    def wait_until_loaded(self, timeout: float) -> bool:
        """Return whether the reward is loaded, or its process has ended, which its first call tells."""
        with suppress(EOFError, OSError):
            if not self._connection.poll(timeout):
                self.kill()
                return False
            self._connection.recv_bytes()
        return True

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

    def __init__(self, reward: RewardCalls, num_workers: int) -> None:
        """Start no process before the first call. Raises CannotLoadError if the reward is no importable object."""
        if getattr(reward.origin, "__module__", None) == "__main__":
            raise CannotLoadError("it is defined in the script itself")
        try:
            self._pickled = pickle.dumps(reward)
        except Exception as error:  # objects of the user
            raise CannotLoadError(describe(error)) from error
        self.reward = reward
        self._num_workers = 1 if reward.is_batched else num_workers
        self._closed = False
        self._changing = threading.Lock()
        self._started: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()  # None: to be started
        self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="reward")
        for _ in range(self._num_workers):
            self._idle.put(None)

    def run(self, calls: Sequence[Call], lost: LostTime) -> list[Outcome]:
        """Score the samples, in order. Raises RolloutError if too much time is lost, or after `close`."""
        jobs: dict[Future[list[Outcome]], list[Call]] = {}
        try:
            for job in self.reward.jobs(calls):
                jobs[self._submit(job)] = job
            for future in as_completed(jobs):
                lost.add(self.reward, future.result()[0], jobs[future][0], num_calls=self._num_workers)
        except CancelledError:
            raise self._ended() from None
        finally:
            for future in jobs:
                future.cancel()
        return [outcome for future in jobs for outcome in future.result()]

    def close(self) -> None:
        """Kill the processes. Calls that wait raise RolloutError."""
        with self._changing:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in self._started:
                worker.kill()

    def _submit(self, calls: Sequence[Call]) -> Future[list[Outcome]]:
        with self._changing:
            if self._closed:
                raise self._ended()
            return self._threads.submit(self._score, calls)

    def _score(self, calls: Sequence[Call]) -> list[Outcome]:
        """Call the reward once, in a thread of the pool."""
        try:  # no process gets images
            samples = pickle.dumps(
                [(replace(p, images=None) if p.images is not None else p, text) for p, text in calls]
            )
        except Exception as error:  # noqa: BLE001  # objects of the user
            return [f"the sample cannot be sent to a process: {describe(error)}"] * len(calls)
        worker = self._idle.get()
        try:
            if worker is None or worker.process.poll() is not None:
                worker = self._start()
            reply = worker.call(samples, self.reward.timeout)
        finally:
            self._idle.put(worker)
        if self._closed:
            raise self._ended()
        if isinstance(reply, list):
            return reply
        return [self.reward.late if reply is None else f"{self.reward.where}: {reply}"] * len(calls)

    def _start(self) -> Worker:
        try:
            with self._changing:
                if self._closed:
                    raise self._ended()
                worker = Worker(self._pickled, worker_environment(self._num_workers))
                self._started.append(worker)
        except OSError as error:
            raise RolloutError(f"{self.reward.where}: no process can be started: {error}") from error
        if not worker.wait_until_loaded(seconds := START_S + self.reward.timeout):
            raise RolloutError(
                f"{self.reward.where}: its process did not load it within {seconds:g} s: load less, or raise "
                "--reward-timeout"
            )
        return worker

    def _ended(self) -> RolloutError:
        return RolloutError(f"{self.reward.where}: the run has ended")


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


def default_workers() -> int:
    """Return the cores per rank of this machine, from 1 to `MAX_WORKERS`."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(usable_cores() // ranks, MAX_WORKERS))
