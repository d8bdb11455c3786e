"""Rewards in processes of their own, by the real command line."""

from pathlib import Path

from tests.e2e import command
from tests.e2e.command import UNEVALUATED, metrics_of, trained

UNTIMED = ("reward/", "loss/", "policy/", "optim/", "completion/", "group/", "progress/")


def numbers(run: Path) -> list[dict[str, float]]:
    return [{name: x for name, x in row.items() if name.startswith(UNTIMED)} for row in trained(metrics_of(run))]


def test_a_run_goes_on_after_rewards_that_crash_and_hang(checkpoint: Path, tmp_path: Path) -> None:
    argv = ["--hf-checkpoint", str(checkpoint), *UNEVALUATED, "--output-dir", str(tmp_path / "run")]
    argv += ["--reward", "tests.e2e.rewards:crashes_and_hangs", "--reward-timeout", "2", "--reward-workers", "2"]
    result = command.run([*argv, "--max-unscored-fraction", "0.99"], tmp_path / "log")
    assert result.code == 0, result.err
    rows = numbers(tmp_path / "run")
    assert len(rows) == 2
    assert all(0 < row["reward/unscored_fraction"] < 1 for row in rows)
    assert "Traceback" not in result.err


def test_the_number_of_reward_processes_changes_no_number_and_may_change_on_resume(
    checkpoint: Path, tmp_path: Path
) -> None:
    argv = ["--hf-checkpoint", str(checkpoint), *UNEVALUATED, "--no-export"]
    runs = {}
    for name, parts in {"thread": ["0"], "processes": ["1", "2"]}.items():
        folder = tmp_path / name
        for part, workers in enumerate(parts, start=1):
            rollouts = str(part if len(parts) > 1 else 2)
            more = ["--num-rollout", rollouts, "--reward-workers", workers, "--output-dir", str(folder)]
            result = command.run([*argv, *more], tmp_path / f"log {name} {part}")
            assert result.code == 0, result.err
        runs[name] = numbers(folder)
    assert len(runs["thread"]) == 2
    assert runs["thread"] == runs["processes"]
