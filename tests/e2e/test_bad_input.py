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


BAD_INPUT: dict[str, tuple[Prepare | list[str], list[str]]] = {
    "no tokenizer": (no_tokenizer, ["--hf-checkpoint", "tokenizer"]),
    "another tokenizer": (
        tokenizer_of_another_model,
        ["--hf-checkpoint", "its tokenizer uses token id 260", "200 tokens"],
    ),
    "reward": (["--reward", "tests.e2e.rewards:exits"], ["scored none of", "SystemExit: 0 (rewards.py:"]),
    "loss": (["--loss", "tests.e2e.losses:exits"], ["was interrupted by SystemExit: 0 (losses.py:"]),
    "NaN": (["--loss", "tests.e2e.losses:not_finite"], ["nothing was trained", "all 2 optimizer steps", "--loss"]),
    "prompts": (["--rollout-max-prompt-len", "3"], ["--rollout-max-prompt-len"]),
    "responses": (
        ["--mask-truncated", "--rollout-max-response-len", "2"],
        ["all 16 responses were cut off at --rollout-max-response-len 2; raise it"],
    ),
    "teacher": (["--algorithm", "opd", "--opd-teacher", "http://127.0.0.1:9"], ["http://127.0.0.1:9", "reached"]),
    "its tokenizer": (teacher_of_another_tokenizer, ["--opd-teacher", "another tokenizer", "differ"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line(case: str, checkpoint: Path, tmp_path: Path) -> None:
    prepare, words = BAD_INPUT[case]
    flags = prepare if isinstance(prepare, list) else prepare(tmp_path, checkpoint)
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(tmp_path / "run"), *TINY_RUN, *flags]
    result = command.run(argv, tmp_path / "out")
    assert result.code == 2, result.err
    last = result.err.strip().splitlines()[-1]
    assert "Traceback" not in result.err
    assert last.startswith("fsdptrain: ")
    for word in words:
        assert word in last
