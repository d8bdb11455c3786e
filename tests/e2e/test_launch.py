"""Real ranks under fsdptrain's own launcher, torchrun, accelerate, and started one by one."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from fsdptrain.cores import usable_cores
from tests.e2e import command
from tests.matrix import only
from tests.testing import rank_variables, reserved_port, wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = ["-m", "tests.e2e.rank_program"]
REFUSED = "fsdptrain: --hf-checkpoint x holds no config.json"
pytestmark = pytest.mark.slow


def start(*argv, variables=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})}
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # tests in the background may ignore it
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *argv], env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed
    )


def finish(process):
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def ready_pids(process):
    return [int(process.stdout.readline().split()[1]) for _ in range(2)]


FATES = [
    ("die", 2, "fsdptrain: rank 1 was killed by SIGKILL; the host may be out of memory", "--nproc-per-node"),
    ("fail", 1, "fsdptrain: rank 1 failed", "ZeroDivisionError: a bug"),
    ("refuse", 2, REFUSED, REFUSED),
]


@pytest.mark.parametrize(("fate", "code", "first", "last"), only(FATES[:2], FATES))
def test_every_kind_of_failure_is_reported_once(fate, code, first, last):
    found, out, err = finish(start(*PROGRAM, fate))
    assert (found, out) == (code, "")
    lines = err.splitlines()
    assert lines[0].startswith(first)
    assert lines[-1].endswith(last)
    assert len([line for line in lines if line.startswith("fsdptrain: ")]) == 1


def test_the_console_has_the_output_of_all_ranks_and_cores_are_divided(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = max(1, usable_cores() // 2)
    code, out, err = finish(start(*PROGRAM, "talk"))
    assert code == 0
    assert sorted(out.splitlines()) == [f"rank {rank}: 2 ranks, {threads} threads" for rank in range(2)]
    assert sorted(err.splitlines()) == [f"rank {rank} warns" for rank in range(2)]


SIGNALS = [
    (signal.SIGKILL, -9, ""),
    (signal.SIGINT, 130, "fsdptrain: stopped by Ctrl-C\n"),
    (signal.SIGTERM, 143, "fsdptrain: stopped by SIGTERM\n"),
]


@pytest.mark.parametrize(("signum", "code", "line"), only(SIGNALS[:1], SIGNALS))
def test_no_rank_outlives_the_command(signum, code, line):
    process = start(*PROGRAM, "wait")
    pids = ready_pids(process)
    process.send_signal(signum)
    assert finish(process) == (code, "", line)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 20)


TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--max_restarts", "1"]


@pytest.mark.matrix
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE])
def test_under_a_launcher_an_error_of_one_or_of_all_ranks_is_one_line(launcher):
    code, _, err = finish(start("-m", *launcher, *PROGRAM, "refuse", "refuse together"))
    assert code == 1
    assert [line for line in err.splitlines() if line.startswith("fsdptrain: ")] == [REFUSED, REFUSED]


def tiny_run(checkpoint, folder, *more):
    argv = [*command.TINY_RUN, "--hf-checkpoint", str(checkpoint), "--output-dir", str(folder)]
    return ["-m", "fsdptrain", *argv, "--eval-interval", "1000", "--no-export", *more]


def steps(folder):
    return [row["step"] for row in command.metrics_of(folder) if "reward/mean" in row]


@pytest.mark.matrix
def test_a_rank_is_killed_under_two_agents_and_the_run_resumes_from_its_newest_checkpoint(checkpoint, tmp_path):
    """Also with --resume never, which holds for the start alone."""
    folder, marker = tmp_path / "run", tmp_path / "killed"
    argv = tiny_run(checkpoint, folder, "--num-rollout", "5", "--save-interval", "1", "--keep-last", "9")
    argv += ["--resume", "never", "--reward", "tests.e2e.rewards:killed_once", "--reward-workers", "0"]
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1"]
    variables = {"KILLED": str(marker), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with reserved_port() as port:
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        agents = [start(*torchrun, *argv, variables=variables) for _ in range(2)]
        outputs = [finish(agent) for agent in agents]
    assert [code for code, *_ in outputs] == [0, 0], outputs
    assert marker.exists()
    assert steps(folder) == [1, 2, 3, 4, 5]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == [f"step_{step:08d}" for step in range(1, 6)]  # a second attempt at a step has another name


def test_ranks_with_different_options_are_refused_before_anything_is_loaded(tmp_path):
    argv = ["--hf-checkpoint", str(tmp_path / "nowhere"), "--output-dir", str(tmp_path / "run")]
    with reserved_port() as port:
        ranks = [
            command.start([*argv, "--lr", f"{rank + 1}e-6"], tmp_path / f"{rank}", rank_variables(rank, 2, port))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.join(300)
    assert [rank.exitcode for rank in ranks] == [2, 2]
    line = (tmp_path / "0/err").read_text()
    assert re.fullmatch(
        r"fsdptrain: all ranks must have the same versions and options: --lr is 1e-06 on rank 0 \(.+\) and 2e-06 on "
        r"rank 1 \(.+\)\n",
        line,
    )
    assert not (tmp_path / "run").exists()
