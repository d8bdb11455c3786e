"""Of several errors the cause is shown, not its echoes; and what was started must be what the flags say."""

import json
from dataclasses import replace

import pytest
import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, DataError, RankError
from fsdptrain.launch.failures import AGENT, Level, Report, read_failures, read_report
from fsdptrain.launch.meeting import Go, meet
from fsdptrain.launch.ranks import distributed, failure_of
from fsdptrain.launch.rounds import _Rounds, _terms


def test_the_cause_comes_before_its_echoes_and_before_later_errors(tmp_path):
    cause = failure_of(DataError("--prompt-data x is empty"), 2)
    for failure in (
        replace(failure_of(RankError("rank 2: --prompt-data x is empty"), 0), time=cause.time - 1),
        replace(failure_of(RuntimeError("connection lost"), 1), time=cause.time + 1),
        cause,
    ):
        failure.write(tmp_path)
    assert [failure.rank for failure in read_failures(tmp_path)] == [2, 1, 0]
    assert read_failures(tmp_path)[0] == cause


BUG, LOST = ZeroDivisionError("a bug"), RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("codes", "errors", "line"),
    [
        ({0: -6, 1: 1}, {1: BUG}, "rank 1 failed\nZeroDivisionError: a bug"),  # a watchdog that misses rank 1
        ({1: -6}, {1: BUG}, "rank 1 failed\nZeroDivisionError: a bug"),  # which it has in its own end
        ({1: -11}, {1: BUG}, "rank 1 failed\nZeroDivisionError: a bug"),
        ({0: -6, 1: -9}, {}, "rank 1 was killed by SIGKILL; the host"),
        ({0: -6, 1: 1}, {1: LOST}, "rank 0 was killed by SIGABRT"),
        ({0: 1, 1: -9}, {0: LOST}, "rank 1 was killed by SIGKILL; the host"),
        ({0: -15, 1: 1}, {1: BUG}, "rank 1 failed\nZeroDivisionError: a bug"),
    ],
)
def test_a_signal_hides_no_traceback_that_tells_more(tmp_path, codes, errors, line):
    for rank, error in errors.items():
        failure_of(error, rank).write(tmp_path)
    (tmp_path / AGENT).write_text(json.dumps(codes))
    assert read_report(tmp_path, 1).text.startswith(line)


def test_an_aborted_rank_of_one_machine_does_not_hide_the_error_of_another(tmp_path):
    (tmp_path / AGENT).write_text(json.dumps({0: -6}))
    assert read_report(tmp_path, 1).level > Level.NODE > Report("rank 3 failed").level


@pytest.mark.parametrize(
    ("resume", "round", "saved", "goes_on"),
    [
        ("auto", 1, True, False),  # it does by itself
        ("never", 0, False, False),
        ("never", 1, False, True),
        ("never", 1, True, True),
        ("old/checkpoints/step_00000010", 0, False, False),
        ("old/checkpoints/step_00000010", 1, False, False),  # not from what it was taken back from
        ("old/checkpoints/step_00000010", 1, True, True),
    ],
)
def test_a_round_after_the_first_goes_on_from_what_the_run_has_saved(resume, round, saved, goes_on):
    config = Config(hf_checkpoint="x", resume=resume, max_restarts=2)
    rounds = _Rounds(config, ["--resume", resume], 2, "fsdptrain", meet(_terms(config, 2)))
    argv = rounds._argv_of(Go(round, "", "launch", "", saved))
    assert argv == ["--resume", resume, *(["--resume", "auto"] if goes_on else [])]


def test_a_checkpoint_counts_as_saved_when_another_is_the_newest(tmp_path):
    for name in ("step_00000010", "step_00000050"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    config = Config(hf_checkpoint="x", output_dir=str(tmp_path))
    meeting = meet(_terms(config, 2))
    assert not meeting.gather().saved
    (tmp_path / "checkpoints" / "step_00000020").mkdir()  # of a run that was taken back to 10
    (tmp_path / "checkpoints" / "step_00000050").rmdir()
    assert meeting.gather().saved


def test_a_process_alone_has_a_group_that_ends_with_it():
    with distributed(Config(hf_checkpoint="x")):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        with distributed(Config(hf_checkpoint="x")):
            pass
        assert dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"nproc_per_node": 4}, "--nproc-per-node 4 does not fit the 1 processes that were started here"),
        ({"nnodes": 2, "rdzv_endpoint": "h:1"}, "--nnodes 2 does not fit the 1 machines that were started"),
        ({"max_restarts": 3}, "--max-restarts has no effect where fsdptrain does not start the processes itself"),
        ({"log_rank_dir": "logs"}, "--log-rank-dir has no effect where"),
        ({"fsdp_replicate_size": 2}, "--fsdp-replicate-size 2 must divide the number of processes, 1"),
    ],
)
def test_processes_that_do_not_fit_are_refused(values, line):
    with pytest.raises(ConfigError, match=line), distributed(Config(hf_checkpoint="x", **values)):
        pass
    assert not dist.is_initialized()
