"""Stacks of a rank are written when a wait takes too long, and the error names their folder."""

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
