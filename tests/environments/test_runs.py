"""Runs of the command line with verifiers and OpenEnv: the trainer gets their rewards and the sampled tokens."""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from fsdptrain.config import load_recipe
from tests.e2e import command
from tests.e2e.command import metrics_of, rows_of, trained
from tests.environments.conftest import FOREIGN, OPENENV, VERIFIERS, words_of_nltk
from tests.testing import reserved_port, save_tiny_checkpoint

FLAGS = [
    *("--prompt-data", "environment", "--reward", "environment", "--eval-interval", "0", "--no-rollout-shuffle"),
    *("--rollout-max-prompt-len", "200", "--rollout-max-response-len", "64", "--max-tokens-per-gpu", "1024"),
    *("--lr", "1e-3", "--no-bf16", "--episode-timeout", "60", "--log-num-samples", "8", "--log-to"),
]


RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = [  # than the models of recipes
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--global-batch-size", "2", "--num-rollout", "1"),
    *("--rollout-max-prompt-len", "1500", "--no-gradient-checkpointing", "--max-tokens-per-gpu", "2048"),
]


def _recipe(name: str) -> Mapping[str, Any]:
    """Return the arguments of the environment."""
    return load_recipe(RECIPES / f"{name}.yaml").environment.environment_kwargs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def run(
    model: Path,
    folder: Path,
    environment: str,
    kwargs: dict[str, Any],
    *flags: str,
    code: int = 0,
    variables: Mapping[str, str] | None = None,
) -> Any:
    argv = ["--hf-checkpoint", str(model), "--output-dir", str(folder / "run"), "--environment", environment]
    argv += ["--environment-kwargs", json.dumps(kwargs), *FLAGS, *flags]
    process = command.start(argv, folder, {"PYTHONPATH": str(FOREIGN), **(variables or {})})
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


def test_the_recipe_of_verifiers_trains_on_hangman(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {
        "taskset": {"id": "textarena", "game": "Hangman-v0"},
        "python": VERIFIERS,
        "num_tasks": 4,
        "player": {"max_turns": 2, "sampling": {"max_tokens": 20}},
    }
    assert kwargs["taskset"] == _recipe("verifiers_hangman_qwen3_4b")["taskset"]
    flags = ["--recipe", str(RECIPES / "verifiers_hangman_qwen3_4b.yaml"), "--no-skip-zero-advantage", *SMALL]
    variables = {"NLTK_DATA": str(words_of_nltk(tmp_path))}
    [row], samples = run(model, tmp_path, "verifiers", kwargs, *flags, variables=variables)
    assert row["agent/failed_episodes"] == 0
    assert row["agent/calls"] >= 4
    assert row["reward/game_reward"] == row["reward/mean"] == 0  # no letter of the word
    assert row["mismatch/abs_max"] < 1e-4
    assert "You are playing Hangman" in samples[0]["prompt"]


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
