"""When each stage of this rank began and ended, and how long it was idle."""

import itertools
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

STAGES = ("generate", "reward", "score", "train", "sync", "check", "eval", "save")
# What can be idle while the others work -> its stages.
WORKERS: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate",),
    "reward": ("reward",),
    "train": ("score", "train"),
    "sync": ("sync",),
}


@dataclass(frozen=True)
class Span:
    stage: str
    rollout: int  # counted from 1; 0: before the first one
    begin: float  # [s] since 1970
    end: float

    def as_row(self) -> dict[str, Any]:
        return {**vars(self), "begin": round(self.begin, 4), "end": round(self.end, 4)}


class Timeline:
    """The stages of one rank, from all of its threads."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()  # one clock, which nobody sets while the run goes on
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count()
        self._ended: list[Span] = []
        self._new: list[Span] = []  # since `take`

    def now(self) -> float:
        """[s] since 1970"""
        return self._offset + time.perf_counter()

    @contextmanager
    def stage(self, name: str, rollout: int) -> Iterator[None]:
        """`name` is one of `STAGES`, and goes on while the block does. Stages may overlap."""
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
        """What has ended since the last call."""
        with self._lock:
            taken, self._new = self._new, []
        return taken

    def busy(self, stages: Collection[str], begin: float, end: float) -> float:
        """How long any of `stages` went on between `begin` and `end`; they may go on still. Later calls must not begin
        earlier. [s]"""
        with self._lock:
            self._ended = [span for span in self._ended if span.end > begin]
            found = [(span.begin, span.end) for span in self._ended if span.stage in stages]
            found += [(start, end) for name, start in self._open.values() if name in stages]
        return covered(found, begin, end)


class Stopwatch:
    """Seconds by stage of one rollout: `with watch("train"): ...`, then `watch.seconds["train"]`. Those of `STAGES` are
    on the timeline too."""

    def __init__(self, timeline: Timeline | None = None, rollout: int = 0) -> None:
        self.timeline = timeline or Timeline()
        self.rollout = rollout
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """A stage that comes again is added up."""
        start = time.perf_counter()
        if stage in STAGES:
            with self.timeline.stage(stage, self.rollout):
                yield
        else:
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How much of [begin, end] lies in at least one of `spans`."""
    total, last = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = max(start, last), min(stop, end)
        if stop > start:
            total += stop - start
            last = stop
    return total
