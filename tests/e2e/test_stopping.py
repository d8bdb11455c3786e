"""Ctrl-C and SIGTERM end a run after the current step, with a checkpoint; a second signal ends it at once."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.test_launch import finish, start
from tests.testing import wait_until

IN_BACKGROUND = [  # as after `&` in a script
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "os.execv(sys.executable, [sys.executable, '-m', 'fsdptrain', *sys.argv[1:]])",
]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--shutdown-timeout", "150", "-m", "fsdptrain"]
LAUNCHER = ["--nproc-per-node", "2"]


def argv(checkpoint: Path, folder: Path, *more: str) -> list[str]:
    options = [*command.UNEVALUATED, "--hf-checkpoint", str(checkpoint), "--output-dir", str(folder)]
    options += ["--num-rollout", "9", "--save-interval", "0", "--no-export"]
    return [*options, "--reward", "tests.e2e.rewards:half_a_second", "--reward-workers", "0", *more]


def has_stepped(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() and bool(command.metrics_of(folder))


def stopped(signum: int, folder: Path, flags: list[str]) -> tuple:
    """Exit code and stderr of a process that gets the signal after its first step."""
    process = command.start(flags, folder.parent / "log")
    wait_until(lambda: has_stepped(folder), 120, alive=process.is_alive)
    os.kill(process.pid, signum)
    process.join(120)
    return process.exitcode, (folder.parent / "log" / "err").read_text()


@pytest.mark.parametrize(
    ("signum", "code", "launch", "more"),
    [
        pytest.param(signal.SIGINT, 130, None, [], id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, IN_BACKGROUND, LAUNCHER, id="SIGTERM to the launcher in the background"),
        pytest.param(signal.SIGTERM, 1, TORCHRUN, [], id="SIGTERM to torchrun", marks=pytest.mark.matrix),
    ],
)
def test_the_first_signal_ends_the_run_after_its_step_with_a_checkpoint(
    checkpoint, tmp_path, signum, code, launch, more
):
    folder = tmp_path / "run"
    if launch is None:
        found, err = stopped(signum, folder, argv(checkpoint, folder, *more))
    else:
        process = start(*launch, *argv(checkpoint, folder, *more), variables={"OMP_NUM_THREADS": "1"})
        wait_until(lambda: has_stepped(folder), 120, alive=lambda: process.poll() is None)
        process.send_signal(signum)
        found, _, err = finish(process)
    assert found == code, err
    reason = "SIGTERM" if launch == TORCHRUN else "Ctrl-C"
    assert f"fsdptrain: {reason}: stops after this step and saves a checkpoint; press again to stop immediately" in err
    steps = [row["step"] for row in command.metrics_of(folder)]
    assert 0 < len(steps) < 9
    assert f"stopped: {reason}, after step {steps[-1]} of 9; resume from {folder} by the same command" in err
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{steps[-1]:08d}"]
    if launch is None:
        resumed = command.run(argv(checkpoint, folder, "--num-rollout", str(steps[-1] + 1)), tmp_path / "again")
        assert resumed.code == 0, resumed.err
        assert [row["step"] for row in command.metrics_of(folder)] == [*steps, steps[-1] + 1]


@pytest.mark.matrix
def test_a_second_ctrl_c_ends_the_run_at_once(checkpoint, tmp_path):
    folder = tmp_path / "run"
    process = command.start(argv(checkpoint, folder), tmp_path / "log", {"SECONDS": "60"})
    wait_until((folder / "config.yaml").exists, 120, alive=process.is_alive)
    time.sleep(2.0)  # in the first rollout
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGINT)
    process.join(30)
    err = (tmp_path / "log" / "err").read_text()
    assert process.exitcode == 130, err
    assert "Traceback" not in err
    assert not (folder / "checkpoints").exists()
