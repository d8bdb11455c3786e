"""Where a rank stood is written when a wait takes too long, and an error that comes of it says where."""

import time
import traceback

import pytest

from fsdptrain.rollout.stacks import StackDump


def stands_here() -> None:
    time.sleep(0.5)
    raise ValueError("it has waited in vain")


def test_an_error_that_comes_late_says_where_the_stacks_are(tmp_path):
    stacks = StackDump(tmp_path / "stacks", 3)
    with pytest.raises(ValueError) as caught, stacks.around(0.2):
        stands_here()
    stacks.close()
    assert "stands_here" in (tmp_path / "stacks" / "rank3.txt").read_text()
    assert f"Where each rank stood: {tmp_path / 'stacks'}" in "".join(traceback.format_exception(caught.value))


def test_where_nothing_took_too_long_nothing_is_left(tmp_path):
    ranks = [StackDump(tmp_path / "stacks", rank) for rank in range(2)]
    with pytest.raises(ValueError) as caught, ranks[0].around(60.0):
        stands_here()
    assert not hasattr(caught.value, "__notes__")
    for stacks in ranks:
        stacks.close()
        stacks.close()
    assert not (tmp_path / "stacks").exists()
