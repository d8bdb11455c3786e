"""The engine gets the weights when it will generate with them, and only then."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdptrain import Config, Trainer
from tests.e2e.engines import CALLS

ROWS = [{"prompt": f"say {i}", "label": str(i)} for i in range(16)]


def calls(checkpoint: Path, folder: Path, **values: Any) -> list[str]:
    CALLS.clear()
    config = Config(
        **{
            "hf_checkpoint": str(checkpoint),
            "output_dir": str(folder),
            "num_rollout": 3,
            "rollout_batch_size": 2,
            "rollout_max_response_len": 4,
            "rollout_engine": "tests.e2e.engines:recording",
            "bf16": False,
            "reward": "exact",
            "log_to": [],
            "export": False,
            "keep_last": 0,
            **values,
        }
    )
    Trainer(config, dataset=ROWS).fit()
    return list(CALLS)


@pytest.mark.slow
def test_supervised_training_hands_over_weights_for_evaluations_only(checkpoint: Path, tmp_path: Path) -> None:
    made = calls(checkpoint, tmp_path, algorithm="sft", eval_size=2, eval_interval=2)
    assert made == ["weights 0", "generate", "weights 2", "generate", "weights 3", "generate"]


@pytest.mark.slow
def test_rollouts_always_have_the_newest_weights(checkpoint: Path, tmp_path: Path) -> None:
    made = calls(checkpoint, tmp_path, n_samples_per_prompt=2, eval_interval=0)
    assert made == ["weights 0", "generate", "weights 1", "generate", "weights 2", "generate"]


@pytest.mark.slow
def test_what_a_hand_over_has_shown_is_reported_where_there_was_one(checkpoint: Path, tmp_path: Path) -> None:
    calls(checkpoint, tmp_path, n_samples_per_prompt=2, eval_interval=0, rollout_engine="hf")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "sync/probe_abs_mean" in row] == [1, 2]  # nothing is asked after the last
