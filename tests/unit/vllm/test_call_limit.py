"""A call that hangs ends its process, and others notice nothing."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdptrain.vllm.call_limit import CallLimit
from tests.testing import preloaded_context

pytestmark = pytest.mark.slow


def hang(folder: Path) -> None:
    sys.stderr = (folder / "err").open("w")
    limit = CallLimit(0.5)
    with limit.around("what was called"):
        for _ in range(10):  # steps of a call that works
            time.sleep(0.1)
            limit.restart()
        (folder / "worked").touch()
        threading.Event().wait()


def test_a_hanging_call_ends_its_process_with_stacks_and_one_line(tmp_path):
    process = preloaded_context().Process(target=hang, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == 1
    assert (tmp_path / "worked").exists(), "each step has the whole time"
    *stacks, line = (tmp_path / "err").read_text().splitlines()
    said = "what was called takes longer and cannot be interrupted: raise it, or see the stacks above"
    assert line == f"fsdptrain: --rollout-timeout 0.5: {said}"
    assert any(stack.endswith(" in hang") for stack in stacks)


def returns() -> None: ...


def raises() -> None:
    raise ValueError("what was called is wrong")


def exits() -> None:
    sys.exit(3)


@pytest.mark.parametrize("call", [returns, raises, exits])
def test_no_thread_is_left_after_a_call(call: Callable[[], None]):
    before = set(threading.enumerate())
    limit = CallLimit(600.0)
    try:
        with limit.around("what was called"):
            assert set(threading.enumerate()) > before
            call()
    except (ValueError, SystemExit):
        assert call is not returns
    assert set(threading.enumerate()) == before
