"""Episodes from the command line: a model learns to use a tool. Other environments: test_examples.py."""

import re
from pathlib import Path

import pytest

from examples import stages
from examples.calculator import train as calculator
from tests.e2e import command
from tests.e2e.command import rows_of, trained
from tests.testing import write_rows

GRPO = [*calculator.ENVIRONMENT, *calculator.TASK, *stages.GRPO, *stages.BOTH]


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the time it asks the calculator, half of the time it guesses: the first half of the example, shorter."""
    folder = tmp_path_factory.mktemp("calculator")
    argv = ["--output-dir", str(folder)]
    args = stages.build_parser("", "", warm_up_steps=200, rollouts=0).parse_args(argv)
    stages.warm_up(args, calculator.demonstrations(args.seed), calculator.WORDS)
    return folder / "sft" / "hf"


@pytest.mark.matrix
def test_a_model_learns_to_ask_a_calculator(warm_model: Path, tmp_path: Path) -> None:
    """From half right to nearly always right, on products that it never saw and cannot compute itself."""
    flags = ["--num-rollout", "12", "--eval-interval", "12", "--rollout-seed", "0", "--keep-last", "0", "--log-to"]
    logged = command.train(warm_model, tmp_path, *GRPO, *flags, timeout=400)
    before, after = (row["eval/heldout/accuracy"] for row in logged if "eval/heldout/accuracy" in row)
    assert before < 0.6
    assert after > before + 0.2
    rows = trained(logged)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.2
    assert rows[-1]["episode/several_turns_fraction"] > rows[0]["episode/several_turns_fraction"] + 0.2
    assert rows[-1]["episode/turns_mean"] == 1 + rows[-1]["episode/several_turns_fraction"]  # asked once
    assert max(row["mismatch/abs_max"] for row in rows) < 1e-4  # of the trained tokens, all sampled

    shown = [row for row in rows_of(tmp_path / "run" / "samples.jsonl") if row["reward"] == 1.0]
    assert {row["set"] for row in shown} == {"train", "heldout"}
    pattern = r"<tool>(\d+) \* (\d+)</tool><\|end\|><\|user\|>(\d+)<\|assistant\|><answer>(\d+)</answer><\|end\|>"
    for a, b, heard, answer in (re.fullmatch(pattern, row["response"]).groups() for row in shown):  # type: ignore[union-attr]
        assert int(a) * int(b) == int(heard) == int(answer)


def test_one_run_mixes_environments_and_single_turns_and_reports_each(checkpoint: Path, tmp_path: Path) -> None:
    tasks = [("Calculator", "exact"), ("GuessNumber", "environment"), ("", "exact")]
    rows = [{"prompt": f"{env}{i}", "label": "4", "env": env, "score": score} for i in range(8) for env, score in tasks]
    argv = ["--environment", "examples.calculator.calculator:Calculator", "examples.guess_number.game:GuessNumber"]
    argv += ["--environment-key", "env", "--reward", "exact", "environment", "--reward-key", "score", "--no-bf16"]
    argv += ["--prompt-data", str(write_rows(tmp_path / "rows.jsonl", rows)), "--num-rollout", "1", "--eval-size", "8"]
    argv += ["--rollout-batch-size", "16", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8", "--log-to"]
    logged = command.train(checkpoint, tmp_path, *argv)
    for each in ("Calculator", "GuessNumber", "single_turn"):
        assert {f"reward/environment/{each}", f"eval/heldout/reward_environment/{each}"} <= set().union(*logged)
    write_rows(tmp_path / "rows.jsonl", [*rows, {**rows[0], "env": "Game"}])
    result = command.run(["--dry-run", "--hf-checkpoint", str(checkpoint), *argv], tmp_path)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert (
        "--environment-key env: row rows.jsonl:24 has 'Game', --environment has Calculator, GuessNumber" in result.err
    )
