"""Worker processes that compute a reward. A call that is late or crashes is unscored, and its process is replaced."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
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


class ProcessPool:
    """Processes that call one reward, in a process group of their own. Any thread may use it."""

    grace = 120.0  # [s] to start a process and import the reward in it

    def __init__(self, reward: RewardCalls, num_workers: int) -> None:
        """Start the processes. Raises CannotLoadError if the reward is no importable object."""
        if getattr(reward.function, "__module__", None) == "__main__":
            raise CannotLoadError("it is defined in the script itself")
        try:
            pickled = pickle.dumps(reward)
        except Exception as error:  # objects of the user
            raise CannotLoadError(describe(error)) from error
        self.reward = reward
        self.num_calls = 1 if reward.is_batched else num_workers  # at a time
        self._end = ""  # why no more calls are answered
        self._changing = threading.Lock()
        self._numbers, self._pending = count(), dict[int, tuple[Future[list[Outcome]], int]]()
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), str(os.getpid()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=worker_environment(self.num_calls),
                start_new_session=True,
            )
        self._send((pickled, self.num_calls, reward.timeout))
        threading.Thread(target=self._receive, daemon=True, name="rewards").start()

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
                raise RolloutError(f"{self.reward.where}: {self._end}")
            number = next(self._numbers)
            self._pending[number] = future, len(calls)
            self._send((number, samples))
        return future

    def close(self, reason: str = "the run has ended") -> None:
        """Kill the processes. Calls that wait raise RolloutError."""
        with self._changing:
            self._end = self._end or reason
            pending, self._pending = self._pending, {}
            if self._process.returncode is None:  # else its id may be that of another group
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # it waits for a disk or a driver
                    self._process.wait(5.0)
        for future, _ in pending.values():
            future.set_exception(RolloutError(f"{self.reward.where}: {self._end}"))

    def abandon(self) -> None:
        self.close("its processes do not start, or do not answer")

    def _send(self, message: object) -> None:
        with suppress(OSError):  # it has ended: `_receive` reports that
            self._connection.send_bytes(pickle.dumps(message))

    def _receive(self) -> None:
        with suppress(EOFError, OSError), self._connection:
            while True:
                number, reply = pickle.loads(self._connection.recv_bytes())
                with self._changing:
                    future, num_samples = self._pending.pop(number, (None, 0))
                if future is not None:
                    future.set_result(self._outcomes(reply, num_samples))
        self.close("the parent of its processes has ended")

    def _outcomes(self, reply: list[Outcome] | str | None, num_samples: int) -> list[Outcome]:
        if isinstance(reply, list):
            return reply
        return [self.reward.late if reply is None else f"{self.reward.where}: {reply}"] * num_samples


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
