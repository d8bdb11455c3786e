"""A mistake that is found after the configuration was checked ends in one line with the flag, and exit code 2.

What the configuration itself refuses is tested in tests/unit/config; one line on standard error for it in
test_cli_dry_run.py; broken weights in tests/distributed/test_loading_failures.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.command import TINY_RUN
from tests.testing import save_tiny_checkpoint

Prepare = Callable[[Path, Path], list[str]]  # (folder for the test, a good checkpoint) -> flags


def copy_of(checkpoint: Path, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder / "broken"))


def missing_shard(folder: Path, checkpoint: Path) -> list[str]:
    broken = copy_of(checkpoint, folder)
    next(broken.glob("model-00002*.safetensors")).unlink()
    return ["--hf-checkpoint", str(broken)]


def sizes_of_another_model(folder: Path, checkpoint: Path) -> list[str]:
    broken = copy_of(checkpoint, folder)
    sizes = json.loads((broken / "config.json").read_text()) | {"intermediate_size": 8}
    (broken / "config.json").write_text(json.dumps(sizes))
    return ["--hf-checkpoint", str(broken)]


def no_tokenizer(folder: Path, checkpoint: Path) -> list[str]:
    broken = copy_of(checkpoint, folder)
    for path in broken.glob("tokenizer*"):
        path.unlink()
    return ["--hf-checkpoint", str(broken)]


def tokenizer_of_another_model(folder: Path, checkpoint: Path) -> list[str]:
    return ["--hf-checkpoint", str(save_tiny_checkpoint(folder / "small", vocab_size=200))]


def teacher_of_another_tokenizer(folder: Path, checkpoint: Path) -> list[str]:
    teacher = copy_of(checkpoint, folder)
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in vocabulary if len(token) == 1][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    return ["--algorithm", "opd", "--opd-teacher", str(teacher)]


def raising_reward(folder: Path, checkpoint: Path) -> list[str]:
    return ["--reward", "tests.e2e.rewards:raises"]


def used_folder(folder: Path, checkpoint: Path) -> list[str]:
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("run: {}\n")
    return ["--resume", "never"]


def odd_rows(folder: Path, checkpoint: Path) -> list[str]:
    small = save_tiny_checkpoint(folder / "odd", hidden_size=32, num_attention_heads=2, intermediate_size=48)
    return ["--hf-checkpoint", str(small), "--lora-rank", "4", "--load-in-4bit"]


def flags(*values: str) -> Prepare:
    def prepare(folder: Path, checkpoint: Path) -> list[str]:
        return list(values)

    prepare.__name__ = values[0].removeprefix("--")
    return prepare


BAD_INPUT: list[tuple[Prepare, list[str]]] = [
    (missing_shard, ["--hf-checkpoint", "model-00002"]),
    (sizes_of_another_model, ["--hf-checkpoint", "another shape than config.json says"]),
    (no_tokenizer, ["--hf-checkpoint", "tokenizer"]),
    (tokenizer_of_another_model, ["--hf-checkpoint", "its tokenizer uses token id 260", "200 tokens"]),
    (raising_reward, ["--max-unscored-fraction", "ZeroDivisionError"]),
    (flags("--reward", "tests.e2e.rewards:exits"), ["--reward could not score", "SystemExit: 0 (rewards.py:"]),
    (flags("--loss", "tests.e2e.losses:exits"), ["ended before its end by SystemExit: 0 (losses.py:"]),
    (flags("--loss", "tests.e2e.losses:not_finite"), ["nothing was trained", "all 2 optimizer steps", "--loss"]),
    (used_folder, ["--output-dir", "--resume"]),
    (flags("--rollout-max-prompt-len", "3"), ["--rollout-max-prompt-len"]),
    (flags("--algorithm", "opd", "--opd-teacher", "/nowhere"), ["--opd-teacher /nowhere is not a folder"]),
    (
        flags("--algorithm", "opd", "--opd-teacher", "http://127.0.0.1:9"),
        ["--opd-teacher http://127.0.0.1:9", "reached"],
    ),
    (teacher_of_another_tokenizer, ["--opd-teacher", "another tokenizer", "differ"]),
    (flags("--logprob-kernel", "triton"), ["--logprob-kernel triton cannot be used", "use --logprob-ker"]),
    (odd_rows, ["--load-in-4bit", "multiple of 64"]),
    (flags("--prompt-data-streaming"), ["--prompt-data-streaming has no effect on --prompt-data reasoning_gym:"]),
    (flags("--resume", "nowhere/step_3"), ["--resume", "nowhere"]),
]


@pytest.mark.parametrize(("prepare", "words"), BAD_INPUT, ids=lambda value: getattr(value, "__name__", ""))
def test_bad_input_is_one_line(prepare: Prepare, words: list[str], checkpoint: Path, tmp_path: Path) -> None:
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(tmp_path / "run"), *TINY_RUN]

    result = command.run([*argv, *prepare(tmp_path, checkpoint)], tmp_path / "out")

    assert result.code == 2, result.err
    last = result.err.strip().splitlines()[-1]
    assert "Traceback" not in result.err
    assert last.startswith("fsdptrain: ")
    for word in words:
        assert word in last


def test_checkpoint_of_another_model_is_refused_and_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    argv = ["--output-dir", str(tmp_path / "run"), *TINY_RUN, "--num-rollout", "1"]
    assert command.run(["--hf-checkpoint", str(checkpoint), *argv], tmp_path / "1").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = save_tiny_checkpoint(tmp_path / "other", hidden_size=32)

    result = command.run(["--hf-checkpoint", str(other), *argv, "--num-rollout", "2"], tmp_path / "2")

    assert result.code == 2
    assert "--resume" in result.err.strip().splitlines()[-1]
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
