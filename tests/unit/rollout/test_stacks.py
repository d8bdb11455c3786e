"""Stacks of a rank are written when a wait takes too long, and the error names their folder."""

import ctypes
import os
import select
import threading
import time

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.launch.ranks import failure_of
from fsdptrain.rollout import stacks as module
from fsdptrain.rollout.stacks import StackDump

LIMIT_S = 60.0  # for what comes after a moment


def stands_here(stacks: StackDump, error: Exception) -> None:
    """Until the stacks are written."""
    end = time.monotonic() + LIMIT_S
    with stacks.around(0.2):
        while not stacks.path.stat().st_size and time.monotonic() < end:
            time.sleep(0.01)
        raise error


def waits_there(crowd: threading.Barrier, end: threading.Event) -> None:
    crowd.wait()
    end.wait()


@pytest.fixture
def no_fallback(monkeypatch) -> None:
    monkeypatch.setattr(module, "_FALLBACK_S", 10 * LIMIT_S)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("error", [ValueError("in vain"), RolloutError("it did not answer")])
def test_a_late_error_names_the_folder_of_the_stacks(tmp_path, error):
    stacks, file = StackDump(tmp_path / "stacks", 3), tmp_path / "stacks" / "rank3.txt"
    with pytest.raises(type(error)) as caught:
        stands_here(stacks, error)
    stacks.close()
    assert "stands_here" in file.read_text()
    assert f"tacks of each rank: {tmp_path / 'stacks'}" in failure_of(caught.value, rank=3).text


@pytest.mark.usefixtures("no_fallback")
def test_the_main_thread_is_first_and_equal_stacks_are_written_once(tmp_path):
    """faulthandler writes a hundred threads, and the main thread would not be one of them."""
    stacks, file = StackDump(tmp_path / "stacks", 0), tmp_path / "stacks" / "rank0.txt"
    crowd, end = threading.Barrier(301), threading.Event()
    stacks.arm(10 * LIMIT_S)  # and then to do something else
    threads = [threading.Thread(target=waits_there, args=(crowd, end)) for _ in range(300)]
    for thread in threads:
        thread.start()
    crowd.wait()
    try:
        with pytest.raises(ValueError):
            stands_here(stacks, ValueError("in vain"))
    finally:
        end.set()
        for thread in threads:
            thread.join()
    stacks.close()
    title, first, *others = file.read_text().split("\n\n")
    assert title.startswith(f"Process {os.getpid()} at ")
    assert first.startswith("1 x MainThread (")
    assert "in stands_here" in first
    crowds = [int(text.split(" x ")[0]) for text in others if "in waits_there" in text]
    assert sum(crowds) == 300
    assert len(crowds) < 30  # some may not have come to the same line yet


class Poll(ctypes.Structure):
    """poll(2)"""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def test_stacks_are_written_while_the_gil_is_held(tmp_path, monkeypatch):
    """Into a pipe here, whose reader waits in C and keeps the lock."""
    monkeypatch.setattr(module, "_FALLBACK_S", 0.0)
    file = tmp_path / "stacks" / "rank0.txt"
    file.parent.mkdir()
    os.mkfifo(file)
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    stacks, poll = StackDump(file.parent, 0), Poll(reader, select.POLLIN)
    stacks.arm(0.2)
    assert ctypes.PyDLL(None).poll(ctypes.byref(poll), 1, int(LIMIT_S * 1000)) == 1
    stacks.disarm()
    assert b"in test_stacks_are_written_while_the_gil_is_held" in os.read(reader, 1 << 16)
    stacks.close()
    os.close(reader)


def test_without_a_timeout_no_file_is_left(tmp_path):
    ranks = [StackDump(tmp_path / "stacks", rank) for rank in range(2)]
    with pytest.raises(ValueError) as caught, ranks[0].around(LIMIT_S):
        raise ValueError("at once")
    assert not hasattr(caught.value, "__notes__")
    for stacks in ranks:
        stacks.close()
        stacks.close()
        stacks.dump()
    assert not (tmp_path / "stacks").exists()


def test_a_restarted_run_keeps_the_stacks_of_the_one_before(tmp_path):
    for _ in range(2):
        stacks = StackDump(tmp_path, 0)
        stacks.dump()
        stacks.close()
    assert stacks.path.read_text().count("in test_a_restarted_run_keeps_the_stacks_of_the_one_before") == 2
