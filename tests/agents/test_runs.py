"""Agents from the command line: calls become samples that the trainer agrees with, and a bad episode costs itself."""

import sys
from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.command import metrics_of, rows_of, trained
from tests.matrix import only
from tests.testing import write_rows

AGENTS = "tests.agents.agents"
PROGRAM = Path(__file__).with_name("program.py")
FLAGS = [
    *("--num-rollout", "1", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--eval-interval", "0"),
    *("--rollout-max-prompt-len", "64", "--rollout-max-response-len", "64", "--max-tokens-per-gpu", "512"),
    *("--lr", "1e-3", "--no-bf16", "--system-prompt", "", "--reward", "environment", "--environment-timeout", "60"),
    "--log-to",
]


def run(checkpoint: Path, folder: Path, *flags: str, rows: int = 16, ranks: int = 1, code: int = 0):
    folder.mkdir(exist_ok=True)
    data = write_rows(folder / "rows.jsonl", ({"prompt": str(i), "label": "yes"} for i in range(rows)))
    output = folder / "run"
    argv = ["--hf-checkpoint", str(checkpoint), "--prompt-data", str(data), "--output-dir", str(output), *FLAGS, *flags]
    result = command.run(argv, folder, timeout=300, num_ranks=ranks)
    assert result.code == code, result.err
    return (metrics_of(output), rows_of(output / "samples.jsonl")) if code == 0 else result.err


def test_the_trainer_agrees_with_every_token_that_an_agent_got_on_any_number_of_ranks(
    checkpoint: Path, tmp_path: Path
) -> None:
    rows, _ = run(checkpoint, tmp_path, "--environment", f"{AGENTS}:two_turns")
    for row in trained(rows):
        assert row["mismatch/abs_max"] < 1e-4
        assert row["agent/calls"] == 3 * 16
        assert row["agent/continued_calls"] == 16
        assert row["agent/new_sequences"] == 16  # the summary
        assert row["agent/failed_episodes"] == row["agent/refused_calls"] == 0
        assert row["episode/turns_mean"] == 3  # with the summary
        assert row["reward/a"] + row["reward/length"] == pytest.approx(row["reward/mean"])
    again, _ = run(checkpoint, tmp_path / "again", "--environment", f"{AGENTS}:two_turns", ranks=2)
    names = ["reward/mean", "optim/grad_norm", "completion/length_mean", "policy/entropy"]
    for one, other in zip(trained(rows), trained(again), strict=True):
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-3)


def test_parallel_calls_and_choices_are_sequences_of_one_episode(checkpoint: Path, tmp_path: Path) -> None:
    rows, _ = run(checkpoint, tmp_path, "--environment", f"{AGENTS}:parallel")
    for row in trained(rows):
        assert row["agent/calls"] == row["agent/new_sequences"] == 3 * 16
        assert row["mismatch/abs_max"] < 1e-4


def test_an_episode_that_hangs_or_fails_is_unscored_alone(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--environment", f"{AGENTS}:unreliable", "--environment-timeout", "2", "--max-unscored-fraction", "0.9"]
    flags += ["--rollout-batch-size", "7", "--n-samples-per-prompt", "2", "--num-rollout", "1", "--no-rollout-shuffle"]
    flags += ["--log-num-samples", "14"]
    rows, shown = run(checkpoint, tmp_path, *flags, rows=7)
    [row] = trained(rows)
    assert row["reward/unscored_fraction"] == pytest.approx(5 / 7)
    assert row["agent/failed_episodes"] == 10
    errors = [sample["error"].removeprefix("--environment: ") for sample in shown[:10:2]]
    for error in errors[:2]:
        assert error.startswith("the episode did not end within --environment-timeout 2 s")
    assert errors[2].startswith("the agent made no model call")
    assert "SystemExit: enough" in errors[3]
    assert "'much', which is not a number" in errors[4]
    assert [sample["reward"] for sample in shown[10:]] == [5.0, 5.0, 6.0, 6.0]


def test_calls_that_no_engine_can_take_are_refused_and_end_nothing(checkpoint: Path, tmp_path: Path) -> None:
    rows, _ = run(checkpoint, tmp_path, "--environment", f"{AGENTS}:rude", "--rollout-max-prompt-len", "60")
    for row in trained(rows):
        assert row["agent/refused_calls"] == row["agent/other_sampling"] == 16  # the others are no chat
        assert row["agent/failed_episodes"] == 0


@pytest.mark.parametrize("how", only(["posts"], ["prints", "posts"]))
def test_a_program_is_an_agent(checkpoint: Path, tmp_path: Path, how: str) -> None:
    rows, _ = run(checkpoint, tmp_path, "--environment-command", f"{sys.executable} {PROGRAM} {how}")
    for row in trained(rows):
        assert row["agent/calls"] == 16
        assert row["agent/failed_episodes"] == 0
        assert row["reward/mean"] > 0
        assert row["mismatch/abs_max"] < 1e-4
        assert row.get("reward/label") == (1.0 if how == "posts" else None)


FAILURES = [("fails", "exit code 1: no idea"), ("hangs", "--environment-timeout 3 s")]


@pytest.mark.parametrize(("how", "reason"), only([("fails", "exit code 1: no idea")], FAILURES))
def test_a_program_that_fails_or_hangs_is_named(checkpoint: Path, tmp_path: Path, how: str, reason: str) -> None:
    flags = ["--environment-command", f"{sys.executable} {PROGRAM} {how}", "--environment-timeout", "3"]
    error = run(checkpoint, tmp_path, *flags, "--rollout-batch-size", "1", code=2)
    assert "--reward could not score 4 of 4 samples" in error
    assert reason in error


def test_options_that_agents_do_not_have_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--environment", f"{AGENTS}:two_turns"]
    assert "--max-turns has no effect on an agent" in run(checkpoint, tmp_path, *flags, "--max-turns", "3", code=2)
