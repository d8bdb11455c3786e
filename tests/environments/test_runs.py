"""Runs of the command line with verifiers and OpenEnv: the trainer gets their rewards and the sampled tokens."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import command
from tests.e2e.command import metrics_of, rows_of, trained
from tests.environments.conftest import FOREIGN, OPENENV, VERIFIERS
from tests.testing import reserved_port, save_tiny_checkpoint

FLAGS = [
    *("--prompt-data", "environment", "--reward", "environment", "--eval-interval", "0", "--no-rollout-shuffle"),
    *("--rollout-max-prompt-len", "200", "--rollout-max-response-len", "64", "--max-tokens-per-gpu", "1024"),
    *("--lr", "1e-3", "--no-bf16", "--episode-timeout", "60", "--log-num-samples", "8", "--log-to"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model"))


def run(model: Path, folder: Path, environment: str, kwargs: dict[str, Any], *flags: str, code: int = 0) -> Any:
    argv = ["--hf-checkpoint", str(model), "--output-dir", str(folder / "run"), "--environment", environment]
    argv += ["--environment-kwargs", json.dumps(kwargs), *FLAGS, *flags]
    process = command.start(argv, folder, {"PYTHONPATH": str(FOREIGN)})
    process.join(200)
    process.kill()
    process.join()
    err = (folder / "err").read_text()
    assert process.exitcode == code, err
    return err if code else (trained(metrics_of(folder / "run")), rows_of(folder / "run" / "samples.jsonl"))


def test_the_trainer_gets_rewards_and_tokens_of_verifiers_and_survives_its_end(model: Path, tmp_path: Path) -> None:
    words = ["one", "two", "three", "four", "five", "dies", "six", "seven"]
    player = {"max_turns": 2, "sampling": {"max_tokens": 20}}
    kwargs = {"taskset": {"id": "letters", "words": words}, "python": VERIFIERS, "player": player}
    flags = ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
    flags += ["--environment-workers", "1", "--max-unscored-fraction", "0.5"]
    rows, samples = run(model, tmp_path, "verifiers", kwargs, *flags)
    assert [row["agent/failed_episodes"] for row in rows] == [0, 2]
    assert [row["agent/calls"] for row in rows] == [2 * 8, 2 * 6]
    assert [row["agent/continued_calls"] for row in rows] == [8, 6]
    for row in rows:
        assert row["agent/new_sequences"] == row["agent/refused_calls"] == 0
        assert row["reward/mean"] == pytest.approx(row["reward/letters"])
        assert row["reward/mean"] > 0
        assert row["reward/turns"] == 2
        assert row["mismatch/abs_max"] < 1e-4
        assert row["optim/grad_norm"] > 0
    assert rows[0]["completion/length_mean"] == pytest.approx(rows[0]["reward/tokens"])  # as verifiers counts them
    assert "say one" in samples[0]["prompt"]
    failed = [sample for sample in samples if sample["reward"] is None]
    assert ["its process ended with exit code 3" in sample["response"] for sample in failed] == [True] * 2


def test_a_taskset_that_is_not_there_is_one_line_before_the_model_is_loaded(model: Path, tmp_path: Path) -> None:
    error = run(model, tmp_path, "verifiers", {"taskset": "none-such", "python": VERIFIERS}, code=2)
    assert "--environment verifiers: ModuleNotFoundError: taskset 'none-such' not found" in error
    assert error.count("\n") == 1  # loading a model logs another one


@pytest.fixture
def server() -> Iterator[str]:
    """The address of an OpenEnv server that runs already."""
    with reserved_port() as port:
        argv = [OPENENV, "-m", "uvicorn", "letters_app:app", "--host", "127.0.0.1", "--port", str(port)]
        with subprocess.Popen(argv, cwd=FOREIGN) as process:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while not _answers(url):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield url
            process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False


def test_the_trainer_gets_rewards_and_tokens_of_openenv_until_its_server_dies(
    model: Path, tmp_path: Path, server: str
) -> None:
    kwargs = {"url": server, "python": OPENENV, "num_tasks": 7, "max_tokens": 20}  # the last one ends the server
    flags = ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
    error = run(model, tmp_path, "openenv", kwargs, *flags, code=2)
    [row] = trained(metrics_of(tmp_path / "run"))
    assert row["agent/calls"] == 2 * 8  # two sessions at a time
    assert row["agent/continued_calls"] == 8
    assert row["agent/new_sequences"] == row["agent/failed_episodes"] == row["reward/invalid_action"] == 0
    assert row["reward/mean"] > 0
    assert row["mismatch/abs_max"] < 1e-4
    assert row["optim/grad_norm"] > 0
    assert "fsdptrain: --reward could not score" in error.splitlines()[-1]
    assert "Traceback" not in error
