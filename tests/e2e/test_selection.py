"""Dynamic sampling by the real command line, at its end. A resumed run: test_train.py; ranks: tests/distributed."""

import json
from pathlib import Path

from tests.e2e import command
from tests.e2e.command import metrics_of, trained

FLAGS = [
    *("--num-rollout", "1", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "8"),
    *("--rollout-max-response-len", "8", "--max-tokens-per-gpu", "512", "--eval-interval", "0", "--no-bf16"),
    *("--reward", "tests.e2e.rewards:by_label", "--lr", "1e-3", "--no-export", "--log-to"),
]


def run(checkpoint: Path, folder: Path, *flags: str, labels: list[str]) -> command.Result:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i}", "label": x}) + "\n" for i, x in enumerate(labels)))
    argv = ["--hf-checkpoint", str(checkpoint), "--prompt-data", str(data), "--output-dir", str(folder / "run")]
    result = command.run([*argv, *FLAGS, *flags], folder)
    assert result.code == 0, result.err
    return result


def test_rollouts_that_stay_short_are_trained_on_and_told(checkpoint: Path, tmp_path: Path) -> None:
    labels = ["luck", "1", "0", "1", "1", "0", "0", "1"]
    short = run(checkpoint, tmp_path, "--dynamic-sampling", "--dynamic-sampling-max-rounds", "2", labels=labels)
    assert "rollout 1 trains on 1 of 4 groups: --dynamic-sampling-max-rounds 2 brought no more" in short.err
    [row] = trained(metrics_of(tmp_path / "run"))
    assert (row["progress/samples"], row["selection/missing_groups"]) == (4, 3)


def test_a_run_whose_rewards_are_all_equal_reports_that_it_has_no_learning_signal(
    checkpoint: Path, tmp_path: Path
) -> None:
    result = run(checkpoint, tmp_path, "--num-rollout", "3", labels=["0"] * 9)
    [line] = [line for line in result.err.splitlines() if "no learning signal" in line]
    assert "all rewards were 0 for 3 rollouts" in line
