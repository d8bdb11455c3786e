"""Dynamic sampling by the real command line: resumed, on two ranks, and at its end."""

import json
from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.command import metrics_of, trained
from tests.e2e.test_train import learned, weights

LABELS = ["luck", "0", "1", "luck", "1", "luck", "0", "1", "0"]
FLAGS = [
    *("--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "8"),
    *("--rollout-max-response-len", "8", "--max-tokens-per-gpu", "512", "--eval-interval", "0", "--no-bf16"),
    *("--reward", "tests.e2e.rewards:by_label", "--lr", "1e-3", "--log-to"),
]
SELECT = ["--algorithm", "dapo"]


def run(checkpoint: Path, folder: Path, *flags: str, labels: list[str] = LABELS, num_ranks: int = 1) -> command.Result:
    data = folder.parent / "rows.jsonl"  # its name is part of the prompts' ids, and so of the draws
    data.write_text("\n".join(json.dumps({"prompt": f"say {i}", "label": label}) for i, label in enumerate(labels)))
    argv = ["--hf-checkpoint", str(checkpoint), "--prompt-data", str(data), "--output-dir", str(folder / "run")]
    return command.run([*argv, *FLAGS, *flags], folder, num_ranks=num_ranks)


def selection(folder: Path) -> list[dict[str, float]]:
    families = ("selection/", "group/", "progress/samples")
    return [{k: v for k, v in row.items() if k.startswith(families)} for row in trained(metrics_of(folder / "run"))]


def test_a_resumed_run_selects_as_one_that_never_stopped_and_so_do_two_ranks(checkpoint: Path, tmp_path: Path) -> None:
    whole, resumed, shared = (tmp_path / name for name in ("whole", "resumed", "shared"))
    result = run(checkpoint, whole, *SELECT)
    assert result.code == 0, result.err
    assert "no learning signal" not in result.err
    assert run(checkpoint, resumed, *SELECT, "--num-rollout", "1", "--no-export").code == 0
    assert run(checkpoint, resumed, *SELECT).code == 0
    assert run(checkpoint, shared, *SELECT, "--num-rollout", "2", num_ranks=2).code == 0

    rows = selection(whole)
    assert len(rows) == 3
    for row in rows:
        assert row["selection/rounds"] > 1
        assert 0 < row["selection/kept_fraction"] < 1
        assert 0 < row["group/zero_std_fraction"] < 1
        assert 0 <= row["selection/reward_mean"] <= 1

    assert learned(resumed / "run") == learned(whole / "run")
    assert all((a == b).all() for a, b in zip(weights(resumed / "run"), weights(whole / "run"), strict=True))
    assert selection(shared) == rows[:2]
    for a, b in zip(trained(metrics_of(shared / "run")), trained(metrics_of(whole / "run")), strict=False):
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-4, abs=1e-6)


def test_rollouts_that_stay_short_are_trained_on_and_told_and_empty_ones_end_in_one_line(
    checkpoint: Path, tmp_path: Path
) -> None:
    rounds = ["--dynamic-sampling", "--dynamic-sampling-max-rounds", "2", "--num-rollout", "1"]
    short = run(checkpoint, tmp_path / "short", *rounds, labels=["luck", "1", "0", "1", "1", "0", "0", "1"])
    assert short.code == 0, short.err
    assert "rollout 1 trains on 1 of 4 groups: --dynamic-sampling-max-rounds 2 brought no more" in short.err
    (row,) = selection(tmp_path / "short")
    assert (row["progress/samples"], row["selection/missing_groups"]) == (4, 3)

    empty = run(checkpoint, tmp_path / "empty", *rounds, labels=["1"] * 8)
    assert empty.code == 2
    assert empty.err.splitlines()[-1].startswith("fsdptrain: --dynamic-sampling kept none of 8 groups in 2 rounds")


def test_a_run_whose_rewards_are_all_equal_reports_that_it_has_no_learning_signal(
    checkpoint: Path, tmp_path: Path
) -> None:
    result = run(checkpoint, tmp_path / "equal", "--num-rollout", "3", "--no-export", labels=["0"] * 9)
    assert result.code == 0, result.err
    [line] = [line for line in result.err.splitlines() if "no learning signal" in line]
    assert "all rewards were 0 for 3 rollouts" in line
