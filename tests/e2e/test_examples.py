"""The examples run and learn, on a tiny model."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples import custom_reward, python_api, stages
from examples.code import train as code
from examples.guess_number import train as guess_number
from tests.e2e import command
from tests.e2e.command import metrics_of, rows_of
from tests.matrix import only

ROOT = Path(__file__).parents[2]

TINY: dict[str, Any] = {  # processes of rewards would take seconds to import the module
    "num_rollout": 1, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 8,
    "reward_workers": 0, "bf16": False, "eval_size": 4, "log_to": [],
}  # fmt: skip


def test_python_api(checkpoint: Path, tmp_path: Path) -> None:
    python_api.main(str(checkpoint), str(tmp_path / "run"), **TINY)
    assert (tmp_path / "run" / "hf" / "config.json").is_file()


def test_custom_reward(checkpoint: Path, tmp_path: Path) -> None:
    custom_reward.main(str(checkpoint), str(tmp_path / "run"), **TINY)
    assert any("reward/no_digits" in row for row in metrics_of(tmp_path / "run"))
    shown = (tmp_path / "run" / "samples.jsonl").read_text()
    assert "<answer>" not in shown  # the system prompt of reasoning-gym's data is not for other data


def test_the_attention_of_a_device_is_an_installed_package(checkpoint: Path, tmp_path: Path) -> None:
    source = shutil.copytree(ROOT / "examples" / "device_attention", tmp_path / "package")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", tmp_path / "site", source], check=True, capture_output=True, timeout=300)
    argv = ["--hf-checkpoint", str(checkpoint), *command.TINY_RUN, "--output-dir", str(tmp_path / "run")]
    result = command.run(argv, tmp_path / "log", variables={"PYTHONPATH": str(tmp_path / "site")})
    assert result.code == 0, result.err
    assert "layout: packed, attention fsdptrain_varlen" in result.err
    assert max(row["mismatch/abs_max"] for row in command.trained(metrics_of(tmp_path / "run"))) < 1e-4


@pytest.mark.parametrize(("example", "num_held_out"), only([(guess_number, 0)], [(guess_number, 0), (code, 64)]))
def test_an_example_runs_to_its_end_and_trains_on_no_held_out_task(
    example: ModuleType,
    num_held_out: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A few steps, in processes that have imported torch already; the next test runs the whole example."""

    def run_command(flags: Sequence[str]) -> None:
        process = command.start(flags, tmp_path / "output")
        process.join(300)
        assert process.exitcode == 0, (tmp_path / "output" / "err").read_text()

    monkeypatch.setattr(stages, "run_command", run_command)
    folder = tmp_path / "run"
    example.main(["--warm-up-steps", "21", "--rollouts", "1", "--output-dir", str(folder)])
    assert re.search(r"eval/heldout/\w+: \d\.\d{3} -> \d\.\d{3}\n", capsys.readouterr().out)
    prompts = {file.stem: {row["prompt"] for row in rows_of(file)} for file in folder.glob("*.jsonl")}
    held_out = prompts.pop("held_out", set())
    assert len(held_out) == num_held_out
    assert any(prompts.values())
    assert all(seen.isdisjoint(held_out) for seen in prompts.values())


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["guess_number", "code"])
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    """From half to nearly all of the reward, with what GRPO learns from the reward alone."""
    argv = [sys.executable, ROOT / "examples" / name / "train.py", "--output-dir", tmp_path]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    metric = "eval/heldout/accuracy"
    before, after = (row[metric] for row in metrics_of(tmp_path / "grpo") if metric in row)
    assert before < 0.7
    assert after > before + 0.2
    assert f"{metric}: {before:.3f} -> {after:.3f}" in done.stdout
