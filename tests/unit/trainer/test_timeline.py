"""Overlapping stages of several threads, and idle time."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.trainer.timeline import Stopwatch, Timeline, covered

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: tuple(sorted(pair))), max_size=8)


@given(spans=spans, begin=st.integers(0, 30), length=st.integers(0, 20))
def test_overlapping_spans_count_once_within_the_interval(spans, begin, length):
    ticks = {tick for start, end in spans for tick in range(start, end)} & set(range(begin, begin + length))
    assert covered(spans, begin, begin + length) == pytest.approx(len(ticks))


def test_a_running_stage_is_busy_and_is_a_span_after_its_end():
    timeline, begin = Timeline(), time.time()
    started, go_on = threading.Event(), threading.Event()

    def generate() -> None:
        with timeline.stage("generate", 7):
            started.set()
            go_on.wait()

    thread = threading.Thread(target=generate)
    thread.start()
    started.wait()
    watch = Stopwatch(timeline, 3)
    with watch("train"), watch("step"):
        time.sleep(0.01)
    now = timeline.now()
    assert timeline.busy(("generate",), begin, now) > watch.seconds["train"] >= watch.seconds["step"] >= 0.01
    assert timeline.busy(("reward",), begin, now) == 0
    assert [(span.stage, span.rollout) for span in timeline.take()] == [("train", 3)]
    go_on.set()
    thread.join()
    assert [(span.stage, span.rollout) for span in timeline.take()] == [("generate", 7)]
    assert timeline.take() == []
