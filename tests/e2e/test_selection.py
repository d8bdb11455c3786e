"""Dynamic sampling and rewards at their ends, by the real command line.

A resumed run: test_train.py; ranks: tests/distributed.
"""

from pathlib import Path

from tests.e2e import command
from tests.e2e.command import UNEVALUATED, trained
from tests.testing import write_rows

FLAGS = [
    *("--num-rollout", "1", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "8"),
    *("--rollout-max-response-len", "8", "--max-tokens-per-gpu", "512", "--eval-interval", "0", "--no-bf16"),
    *("--reward-workers", "0"),
    *("--reward", "tests.e2e.rewards:by_label", "--lr", "1e-3", "--no-export", "--log-to"),
]


def run(checkpoint: Path, folder: Path, *flags: str, labels: list[str]) -> list[dict[str, float]]:
    rows = ({"prompt": f"say {i}", "label": x} for i, x in enumerate(labels))
    data = write_rows(folder / "rows.jsonl", rows)
    return trained(command.train(checkpoint, folder, "--prompt-data", str(data), *FLAGS, *flags))


def test_rollouts_that_stay_short_are_trained_on_and_told(checkpoint: Path, tmp_path: Path) -> None:
    labels = ["luck", "1", "0", "1", "1", "0", "0", "1"]
    [row] = run(checkpoint, tmp_path, "--dynamic-sampling", "--dynamic-sampling-max-rounds", "2", labels=labels)
    told = "rollout 1 trains on 1 of 4 groups: --dynamic-sampling-max-rounds 2 brought no more"
    assert told in (tmp_path / "err").read_text()
    assert (row["progress/samples"], row["selection/missing_groups"]) == (4, 3)


def test_a_run_whose_rewards_are_all_equal_reports_that_it_has_no_learning_signal(
    checkpoint: Path, tmp_path: Path
) -> None:
    run(checkpoint, tmp_path, "--num-rollout", "3", labels=["0"] * 9)
    [line] = [line for line in (tmp_path / "err").read_text().splitlines() if "no learning signal" in line]
    assert "all rewards were 0 for 3 rollouts" in line


def test_a_run_goes_on_after_rewards_that_crash_and_hang(checkpoint: Path, tmp_path: Path) -> None:
    """That their processes change no number: tests/unit/rewards/test_pool.py."""
    argv = [*UNEVALUATED, "--rollout-batch-size", "2", "--reward", "tests.e2e.rewards:crashes_and_hangs"]
    argv += ["--reward-timeout", "1", "--reward-workers", "2", "--max-unscored-fraction", "0.99"]
    rows = trained(command.train(checkpoint, tmp_path, *argv))
    assert len(rows) == 2
    assert all(0 < row["reward/unscored_fraction"] < 1 for row in rows)
    assert "Traceback" not in (tmp_path / "err").read_text()
