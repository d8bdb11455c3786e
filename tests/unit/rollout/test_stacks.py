"""Stacks of a rank are written when a wait takes too long, and the error names their folder."""

import ctypes
import os
import select
import time

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.launch.ranks import failure_of
from fsdptrain.rollout.stacks import StackDump

LIMIT_S = 60.0  # for what comes after a moment


def stands_here(stacks: StackDump, error: Exception) -> None:
    """Until the stacks are written."""
    end = time.monotonic() + LIMIT_S
    with stacks.around(0.2):
        while not stacks.path.stat().st_size and time.monotonic() < end:
            time.sleep(0.01)
        raise error


@pytest.mark.parametrize("error", [ValueError("in vain"), RolloutError("it did not answer")])
def test_a_late_error_names_the_folder_of_the_stacks(tmp_path, error):
    stacks, file = StackDump(tmp_path / "stacks", 3), tmp_path / "stacks" / "rank3.txt"
    with pytest.raises(type(error)) as caught:
        stands_here(stacks, error)
    stacks.close()
    assert "stands_here" in file.read_text()
    assert f"tacks of each rank: {tmp_path / 'stacks'}" in failure_of(caught.value, rank=3).text


class Poll(ctypes.Structure):
    """poll(2)"""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def test_stacks_are_written_while_the_gil_is_held(tmp_path):
    """Into a pipe here, whose reader waits in C and keeps the lock."""
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
