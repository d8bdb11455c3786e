"""A whole run by the real command line, in another environment than its server; and what is left when it is killed."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from fsdptrain.rollout.weight_files import folder_name, shared_memory
from fsdptrain.testing import save_tiny_checkpoint
from tests.e2e import command
from tests.vllm.servers.conftest import PYTHON


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_a_run_trains_on_what_the_trainer_would_have_said_and_takes_its_server_with_it(tmp_path):
    model, folder = save_tiny_checkpoint(tmp_path / "model", head_dim=32), tmp_path / "run"
    argv = ["--hf-checkpoint", str(model), *command.TINY_RUN, "--rollout-engine", "vllm-server"]
    argv += ["--rollout-num-servers", "1", "--rollout-server-python", str(PYTHON), "--rollout-kv-cache-gib", "0.05"]
    argv += ["--nproc-per-node", "2", "--num-rollout", "1000", "--output-dir", str(folder)]
    run = command.start(argv, tmp_path / "log")
    try:
        end = time.monotonic() + 400
        while sum("mismatch/abs_max" in row for row in rows(folder)) < 3:
            assert run.is_alive(), (tmp_path / "log" / "err").read_text()
            assert time.monotonic() < end
            time.sleep(0.5)
        assert max(row["mismatch/abs_max"] for row in rows(folder) if "mismatch/abs_max" in row) < 1e-4
        everyone = psutil.Process(run.pid).children(recursive=True)
        assert any("VLLM" in process.name() or "VLLM" in " ".join(process.cmdline()) for process in everyone)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.join()
    _, alive = psutil.wait_procs(everyone, timeout=20)
    assert alive == []
    weights = shared_memory(0)
    assert weights is None or not (weights / folder_name(folder)).exists()


@pytest.mark.parametrize(
    ("python", "why"), [("/nowhere/python", "No such file"), (PYTHON, "unrecognized arguments: --no-such-option")]
)
def test_a_server_that_cannot_start_is_one_line_on_the_command_line(tmp_path, python, why):
    model = save_tiny_checkpoint(tmp_path / "model", head_dim=32)
    argv = ["--hf-checkpoint", str(model), *command.TINY_RUN, "--rollout-engine", "vllm-server"]
    argv += ["--rollout-num-servers", "1", "--rollout-server-python", str(python), "--rollout-kv-cache-gib", "0.05"]
    argv += ["--rollout-engine-args", "no_such_option=1"]
    result = command.run([*argv, "--output-dir", str(tmp_path / "run")], tmp_path / "log", timeout=300)
    assert result.code == 2, result.err
    [line] = [line for line in result.err.splitlines() if "server0.log" in line]
    assert "it ended while it started" in line
    assert why in line
