"""The examples run and learn, on a tiny model."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from examples import custom_reward, python_api, stages
from examples.code import train as code
from examples.distillation import train as distillation
from examples.guess_number import train as guess_number
from examples.judge import train as judge
from examples.judge.judge import serve
from fsdptrain import Config, Trainer
from fsdptrain.errors import ConfigError, RewardError
from fsdptrain.rewards.code import code as run_tests
from fsdptrain.rewards.judge import API_KEY, Judge
from fsdptrain.types import Prompt
from tests.e2e import command
from tests.e2e.command import metrics_of, rows_of

ROOT = Path(__file__).parents[2]

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


@pytest.mark.parametrize(("example", "num_held_out"), [(guess_number, 0), (code, 64), (judge, 44)])
def test_an_example_runs_to_its_end_and_trains_on_no_held_out_task(
    example: ModuleType,
    num_held_out: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A few steps, in processes that have imported torch already; the next test runs the whole example."""

    def run_command(flags: Sequence[str]) -> None:
        process = command.start(flags, tmp_path / "output", {API_KEY: os.environ[API_KEY]})
        process.join(300)
        assert process.exitcode == 0, (tmp_path / "output" / "err").read_text()

    monkeypatch.setattr(stages, "run_command", run_command)
    monkeypatch.setenv(API_KEY, "")  # restores it afterward
    folder = tmp_path / "run"
    example.main(["--warm-up-steps", "21", "--rollouts", "1", "--output-dir", str(folder)])
    assert re.search(r"eval/heldout/\w+: \d\.\d{3} -> \d\.\d{3}\n", capsys.readouterr().out)
    held_out, seen = (
        {
            row["prompt"]
            for file in folder.glob("*.jsonl")
            if (file.stem == "held_out") is which
            for row in rows_of(file)
        }
        for which in (True, False)
    )
    assert len(held_out) == num_held_out
    assert seen
    assert seen.isdisjoint(held_out)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "metric", "gain"),
    [
        ("guess_number", "eval/heldout/accuracy", 0.2),
        ("code", "eval/heldout/accuracy", 0.2),
        ("judge", "eval/heldout/reward_mean", 0.2),
    ],
)
def test_an_example_learns(name: str, metric: str, gain: float, tmp_path: Path) -> None:
    """From half to nearly all of the reward, with what GRPO learns from the reward alone."""
    argv = [sys.executable, ROOT / "examples" / name / "train.py", "--output-dir", tmp_path]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    before, after = (row[metric] for row in metrics_of(tmp_path / "grpo") if metric in row)
    assert before < 0.7
    assert after > before + gain
    assert f"{metric}: {before:.3f} -> {after:.3f}" in done.stdout


@pytest.mark.matrix
def test_students_of_a_teacher_learn(tmp_path: Path) -> None:
    """In 8 rollouts of 64 samples, each from about half to about three quarters."""
    argv = [sys.executable, ROOT / "examples" / "distillation" / "train.py", "--output-dir", tmp_path / "run"]
    done = subprocess.run(
        [*argv, "--rollouts", "8"], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = dict(
        line.split(": ") for line in done.stdout.splitlines() if line.partition(":")[0] in distillation.STUDENTS
    )
    accuracies = {name: [float(value) for value in text.split()] for name, text in rows.items()}
    assert set(accuracies) == set(distillation.STUDENTS)
    assert all(values[-1] > values[0] + 0.1 for values in accuracies.values())


@pytest.mark.parametrize("number", range(1, guess_number.HIGHEST + 1))
def test_one_who_follows_the_hints_wins(number: int) -> None:
    *_, last = guess_number.play(number, Random(0), follow_hints=True)
    assert last == {"role": "assistant", "content": str(number)}


@pytest.mark.parametrize("task", [("+", 1, 2), ("-", 99, 9)])
def test_only_the_program_with_brackets_passes(task: code.Task) -> None:
    prompt = Prompt("p", [1], "", label=code.row_of(task)["label"])
    assert run_tests(prompt, code.program(task, brackets=True)) == {"reward": 1.0, "passed": 1.0}
    assert run_tests(prompt, code.program(task, brackets=False)) == {"reward": 0.0, "passed": 0.0}


def test_the_judge_counts_courtesies(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt("p", [1], "", source=judge.row_of(("Anna", "salt"))["prompt"])
    rude, kind = "Anna, give me the salt.", "Anna, could you give me the salt, please. Thank you."
    responses = [rude, kind, kind.replace("salt", "tea"), kind.replace("Anna", "Leo")]

    async def rewards(url: str, *texts: str) -> list[float]:
        ask = Judge(url, "rule", judge.RUBRIC.read_text())
        return [await ask(prompt, text) for text in texts]

    with serve() as (url, _, key):
        monkeypatch.setenv(API_KEY, key)
        assert asyncio.run(rewards(url, *responses)) == [0.1, 1.0, 0.0, 0.0]
        monkeypatch.setenv(API_KEY, "another")
        with pytest.raises(RewardError, match="401"):
            asyncio.run(rewards(url, rude))
