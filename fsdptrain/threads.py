"""Run user code in parallel threads, with a deadline per call."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

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

    def __init__(self, *, num_threads: int, timeout: float, flag: str = "--environment") -> None:
        """`flag` names the caller in errors; `timeout` is the value of `flag`-timeout."""
        self.num_threads = num_threads
        self.timeout = timeout  # from the start of a call [s]
        self.flag = flag
        self._stuck: list[threading.Thread] = []

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Run all calls and wait for them.

        Returns the result of each call, the exception that it raised, or DeadlineError if it missed its deadline.
        Raises RolloutError if too many earlier calls are still running.
        """
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) > MAX_STUCK:
            raise RolloutError(
                f"{len(self._stuck)} calls of {self.flag} missed {self.flag}-timeout {self.timeout:g} and still "
                "run: give them their own time limit"
            )
        batch = _Batch(calls, self.timeout, self.flag)
        for _ in range(min(self.num_threads, len(calls))):
            batch.start_thread()
        batch.wait()
        self._stuck += batch.left_behind
        return batch.results()


class _Batch(Generic[T]):
    """The calls of one `run`. Hold `changed` to access any field except `calls`."""

    def __init__(self, calls: Sequence[Callable[[], T]], timeout: float, flag: str) -> None:
        self.calls = calls
        self.timeout = timeout
        self.flag = flag
        self.changed = threading.Condition()
        self.waiting = deque(range(len(calls)))
        self.running: dict[int, tuple[float, threading.Thread]] = {}  # call index -> (deadline, thread)
        self.done: dict[int, T | Exception] = {}
        self.left_behind: list[threading.Thread] = []

    def start_thread(self) -> None:
        threading.Thread(target=self._work, daemon=True, name=self.flag.strip("-")).start()

    def wait(self) -> None:
        with self.changed:
            while len(self.done) < len(self.calls):
                first = min((deadline for deadline, _ in self.running.values()), default=None)
                self.changed.wait(None if first is None else max(0.0, first - time.monotonic()))
                self._give_up_late_ones()

    def results(self) -> list[T | Exception]:
        with self.changed:
            return [self.done[index] for index in range(len(self.calls))]

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        late = [index for index, (deadline, _) in self.running.items() if deadline <= now]
        for index in late:
            _, thread = self.running.pop(index)
            self.left_behind.append(thread)
            self.done[index] = DeadlineError(f"no answer within {self.flag}-timeout {self.timeout:g} s")
            if self.waiting:
                self.start_thread()  # replaces the hung thread

    def _work(self) -> None:
        while True:
            with self.changed:
                if not self.waiting:
                    return
                index = self.waiting.popleft()
                self.running[index] = (time.monotonic() + self.timeout, threading.current_thread())
                self.changed.notify()  # this deadline may be the earliest
            result = _attempt(self.calls[index])
            with self.changed:
                if index in self.done:
                    return  # too late: another thread has replaced this one
                del self.running[index]
                self.done[index] = result
                self.changed.notify()


def _attempt(call: Callable[[], T]) -> T | Exception:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  # user code may raise anything; the caller handles it
        return error
    except BaseException as error:  # noqa: BLE001  # exit() in user code must end its call, not this thread
        return RuntimeError(f"{type(error).__name__}: {error}")
