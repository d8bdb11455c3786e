"""Ctrl-C and SIGTERM end a run after the current step, with a checkpoint; a second signal ends it at once."""

import signal
import time
from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.test_launch import finish, start

IN_BACKGROUND = [  # as after `&` in a script
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "os.execv(sys.executable, [sys.executable, '-m', 'fsdptrain', *sys.argv[1:]])",
]
SLOW = ["--reward", "tests.e2e.rewards:half_a_second", "--reward-workers", "0"]


def argv(checkpoint: Path, folder: Path, *more: str) -> list[str]:
    options = [
        *command.UNEVALUATED,
        "--hf-checkpoint",
        str(checkpoint),
        "--output-dir",
        str(folder),
        "--num-rollout",
        "9",
    ]
    return [*options, "--save-interval", "0", "--no-export", *SLOW, *more]


def wait_for_step(folder: Path, number: int, process) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(command.metrics_of(folder)) >= number:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate()[1])


def stopped_by(signum: int, checkpoint: Path, folder: Path, launch: list[str], *more: str) -> tuple[int, str]:
    """Send the signal after the first step. Returns exit code and stderr."""
    process = start(*launch, *argv(checkpoint, folder, *more), variables={"OMP_NUM_THREADS": "1", "SECONDS": "0.5"})
    wait_for_step(folder, 1, process)
    process.send_signal(signum)
    code, _, err = finish(process)
    return code, err


@pytest.mark.parametrize(
    ("signum", "code", "launch", "more"),
    [
        pytest.param(signal.SIGINT, 130, ["-m", "fsdptrain"], [], id="Ctrl-C"),
        pytest.param(
            signal.SIGTERM,
            143,
            IN_BACKGROUND,
            ["--nproc-per-node", "2"],
            id="SIGTERM to the launcher in the background",
        ),
        pytest.param(
            signal.SIGTERM,
            1,  # of torchrun
            ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--shutdown-timeout", "150", "-m", "fsdptrain"],
            [],
            id="SIGTERM to torchrun",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            signal.SIGINT,
            130,
            ["-m", "fsdptrain"],
            ["--nproc-per-node", "2"],
            id="Ctrl-C of the launcher",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_the_first_signal_ends_the_run_after_its_step_with_a_checkpoint(
    checkpoint, tmp_path, signum, code, launch, more
):
    folder = tmp_path / "run"
    found, err = stopped_by(signum, checkpoint, folder, launch, *more)
    assert found == code, err
    reason = "Ctrl-C" if signum == signal.SIGINT or "--nproc-per-node" in more else "SIGTERM"
    assert f"fsdptrain: {reason}: stops after this step and saves a checkpoint; once more stops at once" in err
    steps = [row["step"] for row in command.metrics_of(folder)]
    assert 0 < len(steps) < 9
    assert f"stopped by {reason} after step {steps[-1]} of 9: resume from {folder} by the same command" in err
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{steps[-1]:08d}"]
    resumed = command.run(argv(checkpoint, folder, "--num-rollout", str(steps[-1] + 1)), tmp_path / "log")
    assert resumed.code == 0, resumed.err
    assert [row["step"] for row in command.metrics_of(folder)] == [*steps, steps[-1] + 1]


@pytest.mark.matrix
def test_a_second_ctrl_c_ends_the_run_at_once(checkpoint, tmp_path):
    folder = tmp_path / "run"
    process = start("-m", "fsdptrain", *argv(checkpoint, folder), variables={"SECONDS": "60"})
    deadline = time.monotonic() + 100
    while not (folder / "config.yaml").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2.0)  # in the first rollout
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    code, _, err = finish(process)
    assert (code, time.monotonic() - begin < 30) == (130, True), err
    assert "Traceback" not in err
    assert not (folder / "checkpoints").exists()
