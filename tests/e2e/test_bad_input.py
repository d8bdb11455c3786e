"""A mistake that is found after the configuration was checked ends in one line with the flag, and exit code 2.

What the configuration itself refuses is tested in tests/unit/config; one line on standard error for it in
tests/unit/test_cli.py; broken weights and folders in tests/distributed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.command import TINY_RUN
from tests.testing import CHAT_TEMPLATE, save_tiny_checkpoint, tiny_tokenizer

Prepare = Callable[[Path, Path], list[str]]  # (folder for the test, a good checkpoint) -> flags


def copy_of(checkpoint: Path, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder / "broken"))


def no_tokenizer(folder: Path, checkpoint: Path) -> list[str]:
    broken = copy_of(checkpoint, folder)
    for path in broken.glob("tokenizer*"):
        path.unlink()
    return ["--hf-checkpoint", str(broken)]


def tokenizer_of_another_model(folder: Path, checkpoint: Path) -> list[str]:
    return ["--hf-checkpoint", str(save_tiny_checkpoint(folder / "small", vocab_size=200))]


def template_of_tokens_without_a_row(folder: Path, checkpoint: Path) -> list[str]:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|new{i}|>" for i in range(20)]})
    tokenizer.chat_template = f"{CHAT_TEMPLATE}<|new19|>"
    broken = copy_of(checkpoint, folder)
    tokenizer.save_pretrained(broken)
    return ["--hf-checkpoint", str(broken)]


def teacher_of_another_tokenizer(folder: Path, checkpoint: Path) -> list[str]:
    teacher = copy_of(checkpoint, folder)
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in vocabulary if len(token) == 1][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    return ["--algorithm", "opd", "--opd-teacher", str(teacher)]


def flags(*values: str) -> Prepare:
    def prepare(folder: Path, checkpoint: Path) -> list[str]:
        return list(values)

    prepare.__name__ = values[0].removeprefix("--")
    return prepare


BAD_INPUT: list[tuple[Prepare, list[str]]] = [
    (no_tokenizer, ["--hf-checkpoint", "tokenizer"]),
    (tokenizer_of_another_model, ["--hf-checkpoint", "its tokenizer uses token id 260", "200 tokens"]),
    (
        template_of_tokens_without_a_row,
        ["--hf-checkpoint", "its tokenizer uses token id 2", "without resizing the model"],
    ),
    (flags("--reward", "tests.e2e.rewards:exits"), ["scores none of", "SystemExit: 0 (rewards.py:"]),
    (flags("--loss", "tests.e2e.losses:exits"), ["ended before its end by SystemExit: 0 (losses.py:"]),
    (flags("--loss", "tests.e2e.losses:not_finite"), ["nothing was trained", "all 2 optimizer steps", "--loss"]),
    (flags("--rollout-max-prompt-len", "3"), ["--rollout-max-prompt-len"]),
    (
        flags("--mask-truncated", "--rollout-max-response-len", "2"),
        ["all 16 responses were cut off at --rollout-max-response-len 2; raise it"],
    ),
    (
        flags("--algorithm", "opd", "--opd-teacher", "http://127.0.0.1:9"),
        ["--opd-teacher http://127.0.0.1:9", "reached"],
    ),
    (teacher_of_another_tokenizer, ["--opd-teacher", "another tokenizer", "differ"]),
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
