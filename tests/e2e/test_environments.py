"""Episodes from the command line: a model learns to use a tool. Other environments: test_examples.py."""

import re
from pathlib import Path

import pytest

from examples import stages
from examples.calculator import train as calculator
from tests.e2e import command
from tests.e2e.command import rows_of, trained

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
