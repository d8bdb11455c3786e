"""SmolLM2-135M-Instruct of `make smollm2` with a vLLM server: trainer and server agree after each of five updates."""

from pathlib import Path

import pytest

from tests.e2e import command
from tests.matrix import REAL_MODEL
from tests.testing import write_rows
from tests.vllm.servers.conftest import ONE_SERVER, PYTHON


@pytest.mark.matrix
@pytest.mark.usefixtures("real_model")
def test_trainer_and_server_agree_after_each_update(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i} + {7 - i}? Reply with only the number.", "label": "7"} for i in range(8)]
    argv = ["--prompt-data", str(write_rows(tmp_path / "rows.jsonl", rows)), "--num-rollout", "6", "--no-bf16"]
    argv += ["--reward", "fsdptrain.tools.demo.sums:last_number", "--rollout-batch-size", "2", "--lr", "1e-5"]
    argv += ["--rollout-max-response-len", "12", "--eval-interval", "0", "--keep-last", "0", "--no-export"]
    argv += [*ONE_SERVER[:-1], "0.5", "--rollout-server-python", str(PYTHON)]
    steps = command.trained(command.train(REAL_MODEL, tmp_path, *argv, timeout=500))
    assert len(steps) == 6
    assert all(row["mismatch/abs_max"] < 1e-3 for row in steps)
    assert any(row["optim/grad_norm"] > 0 for row in steps[:-1])
