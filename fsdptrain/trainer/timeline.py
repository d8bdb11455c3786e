"""Start and end times of each stage on this rank, and its idle time."""

import itertools
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

STAGES = ("generate", "reward", "logprobs", "train", "sync", "check", "eval", "save")
# Stages of each worker. A worker can be idle while the others work.
WORKERS: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate",),
    "reward": ("reward",),
    "train": ("logprobs", "train"),
    "sync": ("sync",),
}


@dataclass(frozen=True)
class Span:
    stage: str
    rollout: int  # counted from 1; 0: before the first rollout
    begin: float  # [s] since 1970
    end: float

    def as_row(self) -> dict[str, Any]:
        return {**vars(self), "begin": round(self.begin, 4), "end": round(self.end, 4)}


class Timeline:
    """Record the stages of one rank, from all of its threads."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()  # monotonic: not affected by clock adjustments during the run
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count()
        self._ended: list[Span] = []
        self._new: list[Span] = []  # since the last `take`

    def now(self) -> float:
        """Return the current time. [s] since 1970"""
        return self._offset + time.perf_counter()

    @contextmanager
    def stage(self, name: str, rollout: int) -> Iterator[None]:
        """Record stage `name`, one of `STAGES`, for the duration of the block. Stages may overlap."""
        assert name in STAGES
        begin = self.now()
        with self._lock:
            number = next(self._numbers)
            self._open[number] = (name, begin)
        try:
            yield
        finally:
            with self._lock:
                del self._open[number]
                span = Span(name, rollout, begin, self.now())
                self._ended.append(span)
                self._new.append(span)

    def take(self) -> list[Span]:
        """Return the spans that ended since the last call."""
        with self._lock:
            taken, self._new = self._new, []
        return taken

    def busy(self, stages: Collection[str], begin: float, end: float) -> float:
        """Return the time during which any of `stages` ran between `begin` and `end`. [s]

        Includes stages that are still running. Successive calls must not decrease `begin`.
        """
        with self._lock:
            self._ended = [span for span in self._ended if span.end > begin]
            found = [(span.begin, span.end) for span in self._ended if span.stage in stages]
            found += [(start, end) for name, start in self._open.values() if name in stages]
        return covered(found, begin, end)


class Stopwatch:
    """Measure the seconds per stage of one rollout: `with watch("train"): ...`, then `watch.seconds["train"]`.

    Stages in `STAGES` are also recorded on the timeline, except those in `hidden`.
    """

    def __init__(self, timeline: Timeline | None = None, rollout: int = 0, *, hidden: Collection[str] = ()) -> None:
        self.timeline = timeline or Timeline()
        self.rollout = rollout
        self.seconds: dict[str, float] = {}
        self._hidden = hidden

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time one stage. Repeated stages add up."""
        start = time.perf_counter()
        if stage in STAGES and stage not in self._hidden:
            with self.timeline.stage(stage, self.rollout):
                yield
        else:
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the length of the part of [begin, end] that at least one of `spans` covers."""
    total, last = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = max(start, last), min(stop, end)
        if stop > start:
            total += stop - start
            last = stop
    return total
