"""Real ranks, started in place: they find each other, and when one fails all end and its error is shown once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from fsdptrain.launch.cores import usable_cores
from fsdptrain.testing import free_port, rank_variables
from tests.e2e import command

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def start(*argv, before=(), once=None, **options):
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OPTIONS": json.dumps(options)}
    if once is not None:
        variables["ONCE"] = str(once)
    variables.pop("OMP_NUM_THREADS", None)
    program = [sys.executable, *before, "-m", "tests.e2e.rank_program", *argv]
    pipe = subprocess.PIPE
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # tests in the background may ignore it
    return subprocess.Popen(program, env=variables, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed)


def finish(process):
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def test_ranks_train_together_with_threads_that_share_the_cores():
    threads = max(1, usable_cores() // 2)
    assert finish(start("fine")) == (0, f"2 ranks, {threads} threads\n", "")


def test_an_error_of_one_rank_is_one_line_and_exit_code_2():
    assert finish(start("mendable")) == (2, "", "fsdptrain: --hf-checkpoint x holds no config.json\n")


@pytest.mark.parametrize("fate", ["bug", "aborted"])
def test_a_bug_shows_the_traceback_of_the_rank_that_has_it_once(fate):
    code, out, err = finish(start(fate))
    assert (code, out) == (1, "")
    assert err.startswith("fsdptrain: rank 1 failed\nTraceback")
    assert err.endswith("ZeroDivisionError: a bug\n")
    assert err.count("Traceback") == 1


def test_a_killed_rank_is_named():
    code, _, err = finish(start("killed"))
    assert code == 2
    assert err.startswith("fsdptrain: rank 1 was killed by SIGKILL; the host may be out of memory")
    assert err.count("\n") == 1


def test_a_rank_that_ends_without_a_word_is_named_and_not_those_that_miss_it():
    assert finish(start("silent")) == (9, "", "fsdptrain: rank 1 ended with exit code 9 and left no error\n")


@pytest.mark.parametrize("fate", ["mendable", "everyone"])
def test_under_torchrun_an_error_is_said_once(fate):
    run = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    code, _, err = finish(start(fate, before=["-m", *run]))
    assert code == 1
    assert [line for line in err.splitlines() if line.startswith("fsdptrain: ")] == [
        "fsdptrain: --hf-checkpoint x holds no config.json"
    ]


def test_under_torchrun_our_own_flags_of_the_launch_are_refused(tmp_path):
    argv = ["--hf-checkpoint", "nowhere", "--output-dir", str(tmp_path / "run"), "--max-restarts", "2"]
    run = command.run(argv, tmp_path, num_ranks=2)
    assert run.code == 2
    assert run.err.startswith("fsdptrain: --max-restarts has no effect where fsdptrain does not start the processes")
    assert not (tmp_path / "run").exists()


def test_an_interrupt_ends_all_quietly():
    process = start("interrupted")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "")
    assert [pid for pid in pids if is_running(pid)] == []


def test_ranks_end_with_a_command_that_is_killed():
    process = start("interrupted")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.kill()
    process.communicate(timeout=100)  # which others that live would keep from its end
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if is_running(pid)] == []


def two_machines(fate, **options):
    endpoint = f"127.0.0.1:{free_port()}"
    return [finish(machine) for machine in [start(fate, str(node), endpoint, **options) for node in range(2)]]


def test_two_machines_meet_at_the_endpoint():
    (code, out, err), other = two_machines("fine")
    assert (code, err, other) == (0, "", (0, "", ""))
    assert out.startswith("2 ranks")


def test_the_bug_of_one_machine_is_shown_on_both_though_its_agent_is_deaf():
    """Stopped, it ends by SIGKILL alone; so does an agent that hangs in C++ on a connection that was cut."""
    for code, out, err in two_machines("deaf"):
        assert (code, out) == (1, "")
        assert re.match(r"fsdptrain: node 1 \(.+\): rank 1 failed\nTraceback", err)
        assert err.endswith("ZeroDivisionError: a bug\n")
        assert err.count("Traceback") == 1


def test_two_machines_start_again_after_a_rank_was_killed(tmp_path):
    first, other = two_machines("killed", once=tmp_path / "once", max_restarts=1)
    assert first[1].startswith("2 ranks")
    for code, _, err in (first, other):
        assert code == 0
        assert re.fullmatch(r"fsdptrain: node 1 \(.+\): rank 1 was killed by SIGKILL.+; restart 1 of 1\n", err)


def test_restarts_are_counted_and_what_a_user_must_mend_has_none():
    line = "fsdptrain: rank 1 ended with exit code 9 and left no error"
    assert finish(start("silent", max_restarts=1)) == (9, "", f"{line}; restart 1 of 1\n{line}\n")
    assert finish(start("mendable", max_restarts=1)) == (2, "", "fsdptrain: --hf-checkpoint x holds no config.json\n")


def test_what_ranks_say_is_in_their_files_and_rank_0_is_on_the_console(tmp_path):
    assert finish(start("talks", log_rank_dir=str(tmp_path))) == (0, "rank 0 says\n", "rank 0 warns\n")
    (folder,) = tmp_path.iterdir()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "rank_00000.out": "rank 0 says\n",
        "rank_00000.err": "rank 0 warns\n",
        "rank_00001.out": "rank 1 says\n",
        "rank_00001.err": "rank 1 warns\n",
    }


def test_ranks_of_a_scheduler_with_different_options_are_refused_before_anything_is_loaded(tmp_path):
    port = free_port()
    argv = ["--hf-checkpoint", str(tmp_path / "nowhere"), "--output-dir", str(tmp_path / "run")]
    ranks = [
        command.start([*argv, "--lr", f"{rank + 1}e-6"], tmp_path / f"{rank}", rank_variables(rank, 2, port))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.join(100)
    assert [rank.exitcode for rank in ranks] == [2, 2]
    line = (tmp_path / "0/err").read_text()
    assert line.startswith("fsdptrain: machines of one run must be alike: --lr is 1e-06 on node")
    assert line.count("\n") == 1
    assert not (tmp_path / "run").exists()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
