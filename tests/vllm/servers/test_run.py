"""A whole run from the command line with a server in another environment, and what remains after a kill."""

import contextlib
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


def trained(folder: Path) -> list[dict[str, float]]:
    return [row for row in rows(folder) if "progress/samples" in row]


def shown(folder: Path) -> dict[int, list[str]]:
    """Prompts that were trained on, by step."""
    found: dict[int, list[str]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["set"] == "train":
            found.setdefault(row["step"], []).append(row["prompt"])
    return found


def ranks_of(run: psutil.Process) -> dict[int, psutil.Process]:
    found = {}
    for process in run.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            variables = process.environ()
            if "RANK" in variables and "VLLM_API_KEY" not in variables:
                found.setdefault(int(variables["RANK"]), process)
    return found


@pytest.mark.matrix
def test_a_rank_killed_in_a_sync_ends_the_run_and_resume_loses_no_sample(tmp_path):
    """The server is stopped when all is sampled for the second step: what follows it is the only hand-over that it can
    be stopped in."""
    model, folder = save_tiny_checkpoint(tmp_path / "model", head_dim=32), tmp_path / "run"
    common = ["--hf-checkpoint", str(model), *command.UNEVALUATED, "--num-rollout", "3", "--save-interval", "1"]
    common += ["--nproc-per-node", "2", "--log-num-samples", "16", "--reward", "tests.e2e.rewards:held"]
    common += ["--reward-workers", "0"]
    argv = [*common, "--rollout-engine", "vllm-server", "--rollout-num-servers", "1"]
    argv += ["--rollout-server-python", str(PYTHON), "--rollout-kv-cache-gib", "0.05", "--output-dir", str(folder)]
    argv += ["--update-weight-buffer-size", "20000", "--weight-sync-dir", str(tmp_path / "weights")]
    held = tmp_path / "held"
    held.mkdir()
    run = command.start(argv, tmp_path / "log", {"HELD": str(held)})
    try:
        wait_for(lambda: len(list(held.iterdir())) == 2, run, tmp_path / "log")
        wait_for(lambda: list((folder / "checkpoints").glob("step_*1")), run, tmp_path / "log")
        everyone = psutil.Process(run.pid).children(recursive=True)
        [keeper] = [process for process in everyone if "supervisor.py" in " ".join(process.cmdline())]
        [rank_1] = [process for rank, process in ranks_of(psutil.Process(run.pid)).items() if rank == 1]
        before = set((tmp_path / "weights").rglob("*.safetensors"))
        for process in keeper.children(recursive=True):
            process.suspend()
        (held / "go").touch()
        wait_for(lambda: set((tmp_path / "weights").rglob("*.safetensors")) - before, run, tmp_path / "log")
        assert len(trained(folder)) == 1
        start = time.monotonic()
        rank_1.kill()
        run.join(200)
        assert time.monotonic() - start < 100, "the server was waited for: --weight-sync-timeout is 300"
    finally:
        run.kill()
        run.join()
    assert run.exitcode == 2
    [line] = [line for line in (tmp_path / "log" / "err").read_text().splitlines() if line.startswith("fsdptrain: ")]
    assert "rank 1 was killed by SIGKILL" in line
    _, alive = psutil.wait_procs(everyone, timeout=20)
    assert alive == []

    result = command.run([*argv, "--resume", "auto"], tmp_path / "again", timeout=400)
    assert result.code == 0, result.err
    assert [(row["step"], row["progress/samples"]) for row in trained(folder)] == [(1, 16), (2, 32), (3, 48)]
    undisturbed = tmp_path / "undisturbed"
    result = command.run([*common, "--output-dir", str(undisturbed)], tmp_path / "log2", timeout=200)
    assert result.code == 0, result.err
    assert shown(folder) == shown(undisturbed)


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
