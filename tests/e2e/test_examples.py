"""The examples run, on a tiny model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import custom_reward, python_api
from fsdptrain import Config, Trainer
from fsdptrain.errors import ConfigError
from tests.e2e.command import metrics_of

TINY: dict[str, Any] = {
    "num_rollout": 1,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 8,
    "bf16": False,
    "eval_size": 4,
    "log_to": [],
}


def test_python_api(checkpoint: Path, tmp_path: Path) -> None:
    python_api.main(str(checkpoint), str(tmp_path / "run"), **TINY)
    assert (tmp_path / "run" / "hf" / "config.json").is_file()


def test_custom_reward(checkpoint: Path, tmp_path: Path) -> None:
    custom_reward.main(str(checkpoint), str(tmp_path / "run"), **TINY)
    assert any("reward/no_digits" in row for row in metrics_of(tmp_path / "run"))
    shown = (tmp_path / "run" / "samples.jsonl").read_text()
    assert "<answer>" not in shown  # the system prompt of reasoning-gym's data is not for other data


def test_own_data_and_prompt_data_exclude_each_other() -> None:
    config = Config(hf_checkpoint="x", prompt_data="rows.jsonl")
    with pytest.raises(ConfigError, match="--prompt-data"):
        Trainer(config, dataset=custom_reward.ROWS)


@pytest.mark.matrix
@pytest.mark.parametrize("example", [custom_reward, python_api])
def test_an_example_without_arguments_says_how_to_call_it(example: Any) -> None:
    done = subprocess.run([sys.executable, example.__file__], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1, f"usage: python {example.__file__} MODEL OUTPUT_DIR\n")
