"""A call that hangs ends its process, one that looks at the clock ends by an error, and others notice nothing."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdptrain.vllm.call_limit import CallLimit
from tests.testing import preloaded_context

pytestmark = pytest.mark.slow


def hang(folder: Path, checked: bool) -> None:
    sys.stderr = (folder / "err").open("w")
    with CallLimit(0.5).around("what was called", checked=checked):
        threading.Event().wait()


@pytest.mark.parametrize("checked", [False, True])
def test_a_hanging_call_ends_its_process_with_stacks_and_one_line(tmp_path, checked):
    process = preloaded_context().Process(target=hang, args=(tmp_path, checked))
    process.start()
    process.join(120)
    assert process.exitcode == 1
    *stacks, line = (tmp_path / "err").read_text().splitlines()
    said = f"what was called hangs for {0.625 if checked else 0.5} s and cannot be interrupted; stacks are above"
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


def test_the_time_of_a_call_starts_with_it():
    limit = CallLimit(600.0)
    assert limit.is_over  # nothing is called
    with limit.around("what was called", checked=True):
        assert not limit.is_over
    assert str(limit.error("it")).startswith("it took more than --rollout-timeout, 600 s: raise it")
