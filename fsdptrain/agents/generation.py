"""Generation for concurrent calls, with each kind of engine."""

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fsdptrain.errors import RolloutError
from fsdptrain.protocols import RolloutEngine
from fsdptrain.rollout.in_flight import InFlightEngine, SteppedEngine
from fsdptrain.types import Completion, Prompt, SamplingParams

GATHER_S = 0.01  # a batch starts when no call has come for this time
_MAX_CONCURRENT = 512  # calls in flight


class Generation(Protocol):
    """Generation for the calls of the episodes of one rollout."""

    def submit(self, prompt: Prompt, sampling: SamplingParams) -> "Future[Completion]":
        """Generate one completion. From any thread."""
        ...

    def run_until(self, done: "Future[Any]") -> None:
        """Generate on this thread, if the engine needs that, until `done`. Raises the error of the engine."""
        ...

    def close(self) -> None:
        """Fail the calls that are waiting, and later ones."""
        ...


@dataclass
class BatchedGeneration:
    """Generates in batches on the thread of `run_until`: all calls that are waiting when the engine is free."""

    engine: RolloutEngine
    _waiting: deque[tuple[Prompt, SamplingParams, "Future[Completion]"]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _is_closed: bool = False

    def submit(self, prompt: Prompt, sampling: SamplingParams) -> "Future[Completion]":
        future: Future[Completion] = Future()
        with self._changed:
            if self._is_closed:
                raise RolloutError("the rollout has ended")
            self._waiting.append((prompt, sampling, future))
            self._changed.notify()
        return future

    def run_until(self, done: "Future[Any]") -> None:
        def notify(_: object) -> None:
            with self._changed:
                self._changed.notify()

        done.add_done_callback(notify)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or done.done())
                if done.done():
                    return
            count = 0
            while count < len(self._waiting):
                count = len(self._waiting)
                time.sleep(GATHER_S)
            self._generate()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
        for *_, future in waiting:
            future.cancel()

    def _generate(self) -> None:
        """Generate for the waiting calls that have the parameters of the first."""
        with self._changed:
            sampling = self._waiting[0][1]
            batch = [row for row in self._waiting if row[1] == sampling]
            self._waiting = deque(row for row in self._waiting if row[1] != sampling)
        batch = [row for row in batch if row[2].set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            completions = self.engine.generate([prompt for prompt, *_ in batch], replace(sampling, num_samples=1))
        except BaseException as error:
            for *_, future in batch:
                future.set_exception(RolloutError(str(error)))
            raise
        for (*_, future), completion in zip(batch, completions, strict=True):
            future.set_result(completion)


@dataclass
class InFlightGeneration:
    """Sends each call to an engine that takes requests from any thread."""

    engine: InFlightEngine
    _error: BaseException | None = None

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT, thread_name_prefix="call")
        self._finished = threading.Event()

    def submit(self, prompt: Prompt, sampling: SamplingParams) -> "Future[Completion]":
        return self._threads.submit(self._generate, prompt, replace(sampling, num_samples=1))

    def run_until(self, done: "Future[Any]") -> None:
        done.add_done_callback(lambda _: self._finished.set())
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _generate(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        try:
            [completion] = self.engine.generate_in_flight([prompt], sampling)
        except BaseException as error:
            self._error = error
            self._finished.set()
            raise
        return completion


@dataclass
class SteppedGeneration:
    """Sends each call to an engine that generates on the thread of `run_until`."""

    engine: SteppedEngine
    _submitted: "list[Future[Completion]]" = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of `_submitted` and `_is_closed`
    _is_closed: bool = False

    def submit(self, prompt: Prompt, sampling: SamplingParams) -> "Future[Completion]":
        with self._lock:
            if self._is_closed:
                raise RolloutError("the rollout has ended")
            [future] = self.engine.submit(prompt, replace(sampling, num_samples=1))
            self._submitted.append(future)
        return future

    def run_until(self, done: "Future[Any]") -> None:
        self.engine.work(until=done.done)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for future in self._submitted:
            future.cancel()


def generation_with(engine: RolloutEngine, *, in_flight: bool) -> Generation:
    """in_flight: for a rollout in the background"""
    if isinstance(engine, SteppedEngine) and not in_flight:
        return SteppedGeneration(engine)
    return InFlightGeneration(engine) if isinstance(engine, InFlightEngine) else BatchedGeneration(engine)
