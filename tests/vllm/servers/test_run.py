"""A whole run from the command line with a server in another environment, and what remains after a kill."""

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

from fsdptrain.vllm.server.weight_files import folder_name, shared_memory
from tests.e2e import command
from tests.matrix import only
from tests.testing import save_tiny_checkpoint
from tests.vllm.servers.conftest import PYTHON


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(done: Callable[[], object], run: ForkServerProcess, log: Path) -> None:
    end = time.monotonic() + 400
    while not done():
        assert run.is_alive(), (log / "err").read_text()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("ranks", only([[]], [[], ["--nproc-per-node", "2"]]))
def test_a_run_trains_on_logprobs_that_the_trainer_agrees_with_and_its_server_ends_with_it(tmp_path, ranks):
    model, folder = save_tiny_checkpoint(tmp_path / "model", head_dim=32), tmp_path / "run"
    argv = ["--hf-checkpoint", str(model), *command.TINY_RUN, "--rollout-engine", "vllm-server"]
    argv += ["--rollout-num-servers", "1", "--rollout-server-python", str(PYTHON), "--rollout-kv-cache-gib", "0.05"]
    argv += [*ranks, "--num-rollout", "1000", "--output-dir", str(folder)]
    run = command.start(argv, tmp_path / "log")
    try:
        wait_for(lambda: sum("mismatch/abs_max" in row for row in rows(folder)) > 2, run, tmp_path / "log")
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
    ("python", "why"),
    only(
        [("/nowhere/python", "No such file")],
        [("/nowhere/python", "No such file"), (PYTHON, "unrecognized arguments: --no-such-option")],
    ),
)
def test_a_server_that_cannot_start_is_one_line_on_the_command_line(tmp_path, python, why):
    model = save_tiny_checkpoint(tmp_path / "model", head_dim=32)
    argv = ["--hf-checkpoint", str(model), *command.TINY_RUN, "--rollout-engine", "vllm-server"]
    argv += ["--rollout-num-servers", "1", "--rollout-server-python", str(python), "--rollout-kv-cache-gib", "0.05"]
    argv += ["--rollout-engine-args", "no_such_option=1"]
    result = command.run([*argv, "--output-dir", str(tmp_path / "run")], tmp_path / "log", timeout=300)
    assert result.code == 2, result.err
    [line] = [line for line in result.err.splitlines() if "server0.log" in line]
    assert "it ended during its start" in line
    assert why in line
