"""Real ranks, started in place: they find each other, and when one fails all end and its error is shown once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptrain.testing import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def start(*argv, before=()):
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    variables.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, *before, "-m", "tests.e2e.rank_program", *argv]
    return subprocess.Popen(command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def test_ranks_train_together_with_threads_that_share_the_cores():
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert finish(start("fine")) == (0, f"2 ranks, {threads} threads\n", "")


def test_an_error_of_one_rank_is_one_line_and_exit_code_2():
    assert finish(start("mendable")) == (2, "", "fsdptrain: --hf-checkpoint x holds no config.json\n")


def test_a_bug_shows_the_traceback_of_the_rank_that_has_it_once():
    code, out, err = finish(start("bug"))
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


def test_an_interrupt_ends_all_quietly():
    process = start("interrupted")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "")
    assert [pid for pid in pids if is_running(pid)] == []


def test_two_machines_meet_at_the_endpoint():
    endpoint = f"127.0.0.1:{free_port()}"
    machines = [start("fine", str(rank), endpoint) for rank in range(2)]
    results = sorted(finish(machine) for machine in machines)
    assert [(code, err) for code, _, err in results] == [(0, ""), (0, "")]
    assert results[1][1].startswith("2 ranks")


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
