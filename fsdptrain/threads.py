"""Run user code in parallel threads, with a deadline per call."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from fsdptrain.errors import RolloutError

T = TypeVar("T")

MAX_STUCK = 256  # hung threads; each holds memory, and they may never end


class DeadlineError(TimeoutError):
    """A call missed its deadline and was abandoned."""


class StepThreads:
    """Runs calls in threads. A call that misses its deadline is abandoned together with its result.

    The threads do not prevent the process from exiting. Code that holds the GIL (a long computation in C) cannot be
    abandoned.
    """

    def __init__(self, *, num_threads: int, timeout: float) -> None:
        self.num_threads = num_threads
        self.timeout = timeout  # --environment-timeout, from the start of a call [s]
        self._stuck: list[threading.Thread] = []

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Run all calls and wait for them.

        Returns the result of each call, the exception that it raised, or DeadlineError if it missed its deadline.
        Raises RolloutError if too many earlier calls are still running.
        """
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) > MAX_STUCK:
            raise RolloutError(
                f"{len(self._stuck)} calls of --environment missed --environment-timeout {self.timeout:g} and "
                "still run: give them their own time limit"
            )
        waiting, finished = deque(range(len(calls))), queue.SimpleQueue[tuple[int, T | Exception]]()
        running: dict[int, tuple[float, threading.Thread]] = {}  # index -> (deadline, thread), the earliest first
        results: dict[int, T | Exception] = {}
        while len(results) < len(calls):
            while waiting and len(running) < self.num_threads:
                index = waiting.popleft()
                thread = threading.Thread(
                    target=lambda i=index: finished.put((i, _attempt(calls[i]))), daemon=True, name="environment"
                )
                running[index] = (time.monotonic() + self.timeout, thread)
                thread.start()
            first, (deadline, thread) = next(iter(running.items()))
            try:
                index, result = finished.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                index, result = first, DeadlineError(f"no answer within --environment-timeout {self.timeout:g} s")
                self._stuck.append(thread)
            if running.pop(index, None) is not None:  # else too late
                results[index] = result
        return [results[index] for index in range(len(calls))]


def _attempt(call: Callable[[], T]) -> T | Exception:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  # user code may raise anything; the caller handles it
        return error
    except BaseException as error:  # noqa: BLE001  # exit() in user code must end its call, not this thread
        return RuntimeError(f"{type(error).__name__}: {error}")
