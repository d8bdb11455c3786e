"""The root cause of several failures, and what is said of it."""

import re

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdptrain import platform
from fsdptrain.distributed import is_lost_connection
from fsdptrain.errors import ConfigError, DataError, RankError
from fsdptrain.launch.failures import failure_of, report_failure, root_cause
from fsdptrain.launch.ranks import difference
from fsdptrain.rank_variables import ERROR_FILE

BUG, LOST, USER = ZeroDivisionError("a bug"), RuntimeError("Connection closed by peer"), DataError("x is empty")


def exits_of(codes, errors, folder, monkeypatch):
    """Exit codes and error files of the ranks, as the agent has them."""
    monkeypatch.setenv("FSDPTRAIN_LAUNCHER_PID", "1")
    for rank, error in errors.items():
        monkeypatch.setenv(ERROR_FILE, str(folder / f"{rank}.json"))
        report_failure(failure_of(error, rank, lost_connection=error is LOST))
    return {rank: ProcessFailure(rank, 1, code, str(folder / f"{rank}.json")) for rank, code in codes.items()}


@pytest.mark.parametrize(
    ("codes", "errors", "line"),
    [
        ({0: 2, 1: 1, 2: 2}, {2: USER, 0: RankError("not connected: rank 2"), 1: LOST}, "x is empty"),
        ({0: 2, 1: 2}, {1: USER, 0: DataError("later")}, "x is empty"),
        ({0: -6, 1: 1}, {1: BUG}, "rank 1 failed\nZeroDivisionError: a bug"),  # a watchdog that misses rank 1
        ({1: -6}, {1: BUG}, "rank 1 failed\nZeroDivisionError: a bug"),
        ({1: -11}, {1: BUG}, "rank 1 failed\nZeroDivisionError: a bug"),
        ({0: -15, 1: 1}, {1: BUG}, "rank 1 failed\nZeroDivisionError: a bug"),
        ({0: -6, 1: -9}, {}, "rank 1 was killed by SIGKILL; the host may be out of memory"),
        ({0: -6, 1: 1}, {1: LOST}, "rank 0 was killed by SIGABRT"),
        ({0: 1, 1: -9}, {0: LOST}, "rank 1 was killed by SIGKILL; the host may be out of memory"),
        ({0: 1, 1: 9}, {0: LOST}, "rank 1 exited with code 9 without an error message"),
    ],
)
def test_the_first_failure_is_the_root_cause(codes, errors, line, tmp_path, monkeypatch):
    assert root_cause(exits_of(codes, errors, tmp_path, monkeypatch)).text.startswith(line)


@pytest.mark.parametrize(("error", "code"), [(BUG, 1), (USER, 2), (RankError("not connected: rank 1"), 2)])
def test_errors_of_users_have_the_exit_code_2(error, code):
    assert failure_of(error, 0).exit_code == code


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"), True),
        (RuntimeError("Application timeout caused pair closure"), True),  # by gloo, in the collective after that
        (RuntimeError("shapes do not match"), False),
        (ValueError("Broken pipe"), False),
    ],
)
def test_errors_of_collectives_without_the_other_rank_are_known(error, is_lost):
    assert is_lost_connection(error) == is_lost


def test_a_lost_connection_is_one_line_with_its_place_and_notes():
    error = RuntimeError("Timed out waiting 15000ms\nfor recv")
    error.add_note("Stacks of each rank: run/stacks")
    try:
        raise error
    except RuntimeError:
        failure = failure_of(error, 1, lost_connection=True)
    assert re.fullmatch(
        r"rank 1 lost another rank, .+ \(--dist-timeout\): RuntimeError: Timed out waiting 15000ms for recv "
        r"\(at test_failures\.py:\d+\); Stacks of each rank: run/stacks",
        failure.text,
    )
    assert (failure.exit_code, failure.is_consequence) == (1, True)


def test_the_first_difference_between_ranks_is_reported():
    ours = {"torch": "2", "--lr": "1e-06", "--a": "1", "--b": "1", "--c": "1"}
    assert difference([("rank 0", ours), ("rank 1", ours)]) == ""
    theirs = {**ours, "--lr": "1e-05"}
    assert difference([("rank 0", ours), ("rank 1", theirs)]) == "--lr is 1e-06 on rank 0 and 1e-05 on rank 1"


def test_a_single_process_has_its_own_group():
    with platform.process_group(60):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        with platform.process_group(60):
            pass
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_a_name_from_a_file_cannot_break_or_flood_the_line() -> None:
    text = failure_of(ConfigError("no column a\nb\u2028c; it has " + "x" * 10**6), rank=0).text
    assert text.startswith("no column a b c; it has xxx")
    assert text.endswith(" ...")
    assert len(text.splitlines()) == 1
    assert len(text) < 5000
