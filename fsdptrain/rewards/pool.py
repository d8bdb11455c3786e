"""Worker processes that compute rewards. One that hangs or dies is replaced, and costs its sample.

`concurrent.futures` is no alternative: its pool breaks as a whole when a process dies, and cannot kill a call.
"""

import json
import logging
import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from fsdptrain.errors import RolloutError, describe
from fsdptrain.rewards.calls import MAX_CONCURRENT, Outcome, RewardCalls, no_answer
from fsdptrain.rewards.values import RewardResult
from fsdptrain.rewards.worker import decode, serve
from fsdptrain.types import Prompt

log = logging.getLogger(__name__)

START_S = 120.0  # to import the reward in a new process
SHORT_S = 0.02  # chunks that take less become longer
BUSY_S = 0.02  # samples of a rollout that take longer are worth more processes
GRACE_S = 5.0  # for the event loop, which ends async calls at their deadline itself
_MOST_MISSED = 3  # consecutive misses per worker that raise RolloutError: the cause is then not a single response
_MOST_STUCK = 256  # abandoned threads; each holds memory, and they may never end
_CODE = (
    "import sys; sys.path[:] = sys.argv[3:]; from fsdptrain.rewards.worker import main; main(*map(int, sys.argv[1:3]))"
)


class Process:
    """A reward worker in a process of its own."""

    def __init__(self, pickled: bytes) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(START_S)  # of sending
        arguments = [str(theirs.fileno()), str(os.getpid()), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a group of processes, to kill those that the reward starts too
        )
        theirs.close()
        with suppress(OSError):  # it has ended; `recv` reports that
            self.connection.sendall(pickled)

    def send(self, calls: Sequence[tuple[Prompt, str]]) -> None:
        plain = [(p if p.images is None else replace(p, images=None), response) for p, response in calls]
        self.connection.sendall(pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL))

    def kill(self, *, after: float = 0.0) -> int | None:
        """Kill the process and all that it has started. Returns its exit code, negative for a signal.

        after: time to end by itself [s]
        """
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(after)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it waits for a disk or a driver
            self._process.wait(5.0)
        return self._process.returncode


class Thread:
    """A reward worker in this process. It cannot be killed, only abandoned."""

    def __init__(self, reward: RewardCalls) -> None:
        self.connection, theirs = socket.socketpair()
        self._inbox = queue.SimpleQueue[Any]()
        self.thread = threading.Thread(target=self._work, args=(replace(reward), theirs), daemon=True, name="reward")
        self.thread.start()

    def _work(self, reward: RewardCalls, connection: socket.socket) -> None:
        with connection, closing(reward):
            serve(reward, self._receive, connection)

    def _receive(self) -> Sequence[tuple[Prompt, str]]:
        if (calls := self._inbox.get()) is None:
            raise EOFError
        return calls

    def send(self, calls: Sequence[tuple[Prompt, str]]) -> None:
        self._inbox.put(calls)

    def kill(self, *, after: float = 0.0) -> None:
        del after
        self.connection.close()
        self._inbox.put(None)


class _Worker:
    """A worker and the calls that it has not answered."""

    def __init__(self, made: Process | Thread) -> None:
        self.made = made
        self.connection = made.connection
        self.ready = False
        self.rest = b""  # of an incomplete line
        self.calls: dict[int, int] = {}  # index in the chunk -> sample
        self.size = 1  # of the next chunk
        self.sent = self.since = time.monotonic()  # since: of the last message in either direction


class RewardPool:
    """Up to `num_workers` processes that call one reward. 0: a thread of this process.

    They start when the samples of a rollout take longer than `BUSY_S`. Not thread-safe.

    Args:
        where: names the reward in messages, e.g. "--reward math"
        patience: total time that hung calls may take in one rollout, because other ranks wait for this rank. [s]
    """

    def __init__(self, reward: RewardCalls, num_workers: int, *, where: str, patience: float) -> None:
        self.reward = reward
        self.where = where
        self.timeout = reward.timeout
        self.patience = patience
        self.num_workers = num_workers
        self._target = 1  # processes to use
        self._workers: list[_Worker] = []
        self._abandoned: list[threading.Thread] = []
        self._lost = self._lost_in_a_row = 0.0  # time of workers that waited for hung calls, per worker [s]
        if num_workers:
            try:
                self._pickled = pickle.dumps(reward)
            except Exception as error:  # noqa: BLE001  # user objects may raise anything
                self._use_thread(describe(error))
        self._start()  # imports while the model loads

    def close(self) -> None:
        for worker in self._workers:
            worker.made.kill()
        self._workers = []

    def run(self, calls: Sequence[tuple[Prompt, str]]) -> list[Outcome]:
        """Score the samples, in order. Raises RolloutError if calls hang too often to go on."""
        found: dict[int, Outcome] = {}
        waiting = deque(range(len(calls)))
        self._lost, self._one_by_one, self._first_answer = 0.0, False, math.inf
        while len(found) < len(calls):
            self._send(calls, waiting, found)
            busy = [worker for worker in self._workers if worker.calls or not worker.ready]
            ready = wait([worker.connection for worker in busy], timeout=self._wait_s(busy, waiting))
            for worker in busy:
                try:
                    if worker.connection in ready:
                        self._receive(worker, found)
                except OSError:
                    self._lose(worker, waiting, found, reason=None)
                    continue
                if worker in self._workers and time.monotonic() >= self._deadline(worker):
                    self._lose(worker, waiting, found, reason=no_answer(self.timeout))
            self._check_patience(calls, found)
        return [found[index] for index in range(len(calls))]

    def _send(self, calls: Sequence[tuple[Prompt, str]], waiting: "deque[int]", found: dict[int, Outcome]) -> None:
        """Send calls to idle workers. Start workers if all are busy."""
        self._grow(len(waiting))
        for worker in [worker for worker in self._workers if worker.ready and not worker.calls]:
            if not waiting:
                return
            most = 1 if self._one_by_one else max(1, len(waiting) // self._target)
            size = min(worker.size, most) if self.reward.kind == "sample" or self._one_by_one else len(waiting)
            chunk = [waiting.popleft() for _ in range(size)]
            try:
                worker.made.send([calls[index] for index in chunk])
            except OSError:  # it died while it was idle
                self._remove(worker)
                waiting.extendleft(reversed(chunk))
            except Exception as error:  # noqa: BLE001  # of pickling user objects
                found |= dict.fromkeys(chunk, f"the sample cannot be sent to a worker process: {describe(error)}")
            else:
                worker.calls = dict(enumerate(chunk))
                worker.sent = worker.since = time.monotonic()

    def _receive(self, worker: _Worker, found: dict[int, Outcome]) -> None:
        data = worker.connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        *lines, worker.rest = (worker.rest + data).split(b"\n")
        worker.since = now = time.monotonic()
        for line in map(json.loads, lines):
            if not worker.ready:
                worker.ready = True
                if line is not None:
                    self._use_thread(line)
                continue
            index, outcome = decode(*line)
            found[worker.calls.pop(index)] = outcome
            self._first_answer = min(self._first_answer, now)
            if isinstance(outcome, RewardResult):
                self._lost_in_a_row = 0.0
            elif outcome == no_answer(self.timeout):
                self._count_lost(MAX_CONCURRENT)
        if not worker.calls:
            worker.size = 2 * worker.size if now - worker.sent < SHORT_S else 1

    def _grow(self, num_waiting: int) -> None:
        if num_waiting and time.monotonic() - self._first_answer > BUSY_S:
            self._target = self.num_workers or 1
        num_idle = sum(not worker.calls for worker in self._workers)
        for _ in range(min(self._target - len(self._workers), num_waiting - num_idle)):
            self._start()

    def _start(self) -> None:
        if self.num_workers:
            self._workers.append(_Worker(Process(self._pickled)))
        else:
            self._workers.append(_Worker(Thread(self.reward)))

    def _use_thread(self, reason: str) -> None:
        if len(self._workers) > 1:
            raise RolloutError(f"{self.where}: a new worker process cannot load it: {reason}")
        line = "%s runs in the trainer's process, one call at a time, because no worker process can load it: %s"
        log.warning(line, self.where, reason)
        self.close()
        self.num_workers, self._target = 0, 1

    def _deadline(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + START_S
        return worker.since + self.timeout + (GRACE_S if self.reward.kind == "async" else 0.0)

    def _wait_s(self, busy: Sequence[_Worker], waiting: "deque[int]") -> float:
        first = min(map(self._deadline, busy), default=0.0) - time.monotonic()
        return max(0.0, min(first, BUSY_S) if waiting and self._target < self.num_workers else first)

    def _lose(self, worker: _Worker, waiting: "deque[int]", found: dict[int, Outcome], *, reason: str | None) -> None:
        """Remove a worker that is late (`reason`) or has died. Its sample is unscored; the others are called again."""
        code = self._remove(worker, after=1.0 if reason is None else 0.0)
        if not worker.ready:
            ended = f"ended with exit code {code}" if reason is None else f"was not ready within {START_S:g} s"
            raise RolloutError(f"{self.where}: a worker process {ended} while it imported the reward")
        left = list(worker.calls.values())
        if self.reward.kind == "async" and len(left) > 1:
            self._one_by_one = True  # any of them may be the cause
            guilty = []
        else:
            guilty = left[:1] if self.reward.kind == "sample" else left
        waiting.extendleft(reversed([index for index in left if index not in guilty]))
        found |= dict.fromkeys(guilty, reason or f"--reward: its process ended with {_cause(code)}")
        if reason is not None:
            self._count_lost(self.num_workers or 1)

    def _count_lost(self, num_concurrent: int) -> None:
        self._lost += self.timeout / num_concurrent
        self._lost_in_a_row += self.timeout / num_concurrent

    def _remove(self, worker: _Worker, *, after: float = 0.0) -> int | None:
        self._workers.remove(worker)
        if isinstance(worker.made, Thread):
            self._abandoned = [thread for thread in (*self._abandoned, worker.made.thread) if thread.is_alive()]
            if len(self._abandoned) > _MOST_STUCK:
                raise RolloutError(
                    f"{len(self._abandoned)} calls of {self.where} missed --reward-timeout {self.timeout:g} and still "
                    "run: give them their own time limit"
                )
        return worker.made.kill(after=after)

    def _check_patience(self, calls: Sequence[tuple[Prompt, str]], found: dict[int, Outcome]) -> None:
        if not self._lost:
            return
        late = [calls[index][0].id for index, outcome in found.items() if outcome == no_answer(self.timeout)]
        last = f"last to prompt {late[-1]!r}" if late else "and blocked its event loop"
        if self._lost_in_a_row > (_MOST_MISSED - 0.5) * self.timeout:
            raise RolloutError(
                f"--reward did not answer {_MOST_MISSED} times in a row within {self.timeout:g} s, {last}: give it its "
                "own time limit, or raise --reward-timeout"
            )
        if self._lost + self.timeout > self.patience:
            raise RolloutError(
                f"--reward did not answer {len(late)} times in one rollout within {self.timeout:g} s, {last}, and "
                f"other ranks wait no longer than {self.patience:g} s for that: give it its own time limit, lower "
                "--reward-timeout, or raise --dist-timeout"
            )


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
