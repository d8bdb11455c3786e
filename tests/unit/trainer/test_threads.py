"""Concurrent calls: one that raises or hangs affects no other."""

import multiprocessing
import sys
import threading
import time

import pytest

from fsdptrain import threads as module
from fsdptrain.errors import RolloutError
from fsdptrain.threads import DeadlineError, StepThreads

pytestmark = pytest.mark.slow


def test_results_and_errors_are_in_the_order_of_the_calls():
    def call(i):
        time.sleep(0.01 * (5 - i))
        if i == 3:
            raise KeyError("three")
        if i == 4:
            sys.exit("four")
        return i

    results = StepThreads(num_threads=8, timeout=60.0).run([lambda i=i: call(i) for i in range(6)])
    assert results[:3] == [0, 1, 2]
    assert results[5] == 5
    assert isinstance(results[3], KeyError)
    assert isinstance(results[4], RuntimeError)
    assert "SystemExit: four" in str(results[4])
    assert StepThreads(num_threads=8, timeout=60.0).run([]) == []


def test_a_hanging_call_is_replaced():
    release = threading.Event()
    threads = StepThreads(num_threads=2, timeout=2.0)
    results = threads.run([release.wait, release.wait, *[lambda: "fine"] * 20])
    assert [type(result) for result in results[:2]] == [DeadlineError, DeadlineError]
    assert "--environment-timeout 2" in str(results[0])
    assert results[2:] == ["fine"] * 20
    release.set()


def test_too_many_hanging_calls_stop_the_run(monkeypatch):
    monkeypatch.setattr(module, "MAX_STUCK", 3)
    release = threading.Event()
    threads = StepThreads(num_threads=8, timeout=0.05)
    threads.run([release.wait] * 4)
    with pytest.raises(RolloutError, match=r"4 calls of --environment missed --environment-timeout 0\.05"):
        threads.run([lambda: 1])
    release.set()
    for thread in threads._stuck:
        thread.join(60)
    threads.timeout = 60.0
    assert threads.run([lambda: 1]) == [1]  # they have come back


def hang() -> None:
    [result] = StepThreads(num_threads=1, timeout=0.1).run([threading.Event().wait])
    assert isinstance(result, TimeoutError)


def test_a_hanging_call_does_not_block_the_exit():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.testing"])
    process = context.Process(target=hang)
    process.start()
    process.join(120)
    assert process.exitcode == 0
