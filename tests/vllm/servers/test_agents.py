"""Agents whose calls go to vLLM servers while the trainer trains."""

from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.command import trained
from tests.testing import save_tiny_checkpoint, write_rows
from tests.vllm.servers.conftest import ONE_SERVER, PYTHON

pytestmark = pytest.mark.matrix


def test_the_trainer_agrees_with_the_tokens_of_agents_that_servers_sampled_in_flight(tmp_path: Path) -> None:
    model = save_tiny_checkpoint(tmp_path / "model", head_dim=32)
    data = write_rows(tmp_path / "rows.jsonl", ({"prompt": str(i), "label": ""} for i in range(16)))
    argv = ["--prompt-data", str(data), "--environment", "tests.agents.agents:two_turns"]
    argv += [*ONE_SERVER, "--rollout-server-python", str(PYTHON), "--max-staleness", "1", "--use-rollout-logprobs"]
    argv += ["--num-rollout", "3", "--eval-interval", "0"]
    argv += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "64"]
    argv += ["--max-tokens-per-gpu", "1024", "--reward", "environment", "--lr", "1e-3", "--no-bf16", "--log-to"]
    rows = trained(command.train(model, tmp_path, *argv, timeout=400))
    assert [row["agent/calls"] for row in rows] == [3 * 8] * 3
    assert [row["agent/continued_calls"] for row in rows] == [8] * 3
    assert [row["agent/failed_episodes"] for row in rows] == [0] * 3
    assert rows[0]["mismatch/abs_max"] < 1e-4  # later ones are of older weights
    assert max(row["staleness/max"] for row in rows) == 1
