"""A call that hangs ends its process, one that looks at the clock ends by an error, and others notice nothing."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdptrain.vllm.call_limit import CallLimit
from tests.testing import preloaded_context


def hang(folder: Path, checked: bool) -> None:
    sys.stderr = (folder / "err").open("w")
    with CallLimit(0.5, folder / "stacks", 3).around("what was called", checked=checked):
        threading.Event().wait()


@pytest.mark.parametrize("checked", [False, True])
def test_a_hanging_call_ends_its_process_with_one_line_and_stacks(tmp_path, checked):
    process = preloaded_context().Process(target=hang, args=(tmp_path, checked))
    process.start()
    process.join(120)
    assert process.exitcode == 1
    stacks = tmp_path / "stacks" / "rank3.txt"
    said = f"what was called hangs for {0.625 if checked else 0.5} s and cannot be interrupted; stacks:"
    assert (tmp_path / "err").read_text() == f"fsdptrain: --rollout-timeout 0.5: {said} {stacks}\n"
    assert "in hang\n" in stacks.read_text()


def hang_without_a_folder(folder: Path) -> None:
    (folder / "stacks").write_text("a file where the folder should be")
    hang(folder, checked=False)


def test_a_hanging_call_ends_its_process_without_stacks_too(tmp_path):
    process = preloaded_context().Process(target=hang_without_a_folder, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == 1
    assert (tmp_path / "err").read_text().startswith("fsdptrain: --rollout-timeout 0.5: what was called hangs")


def returns() -> None: ...


def raises() -> None:
    raise ValueError("what was called is wrong")


def exits() -> None:
    sys.exit(3)


@pytest.mark.parametrize("call", [returns, raises, exits])
def test_no_thread_and_no_file_is_left_after_a_call(tmp_path, call: Callable[[], None]):
    before = set(threading.enumerate())
    limit = CallLimit(600.0, tmp_path / "stacks", 0)
    try:
        with limit.around("what was called"):
            assert set(threading.enumerate()) > before
            call()
    except (ValueError, SystemExit):
        assert call is not returns
    assert set(threading.enumerate()) == before
    assert not (tmp_path / "stacks").exists()


def test_the_time_of_a_call_starts_with_it(tmp_path):
    limit = CallLimit(600.0, tmp_path, 0)
    assert limit.is_over  # nothing is called
    with limit.around("what was called", checked=True):
        assert not limit.is_over
    assert str(limit.error("it")).startswith("it took more than --rollout-timeout, 600 s: raise it")
