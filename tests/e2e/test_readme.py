"""The commands of the README are accepted, and export gives the model of the end of the run."""

import re
import shlex
from pathlib import Path

import pytest

from fsdptrain.config import resolve
from tests.e2e import command
from tests.e2e.command import TINY_RUN

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^    (fsdptrain .*?)(?:\s+#.*)?$", README, re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("fsdptrain --")])
def test_commands_are_accepted(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert resolve(shlex.split(line)[1:]).config.model.hf_checkpoint


def test_no_command_is_expanded_by_a_shell() -> None:
    """`?` and `*` outside quotes stop zsh with `no matches found`."""
    for line in COMMANDS:
        assert not set("?*[") & set(re.sub(r"'[^']*'", "", line)), line


def test_export_of_a_checkpoint_is_the_model_at_the_end_of_the_run(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(run), *TINY_RUN]
    assert command.run(argv, tmp_path / "1").code == 0

    exported = ["export", "--checkpoint", str(run / "checkpoints" / "step_00000002"), "--output", str(tmp_path / "hf")]
    result = command.run(exported, tmp_path / "2")

    assert result.code == 0, result.err
    files = sorted(path.name for path in (run / "hf").iterdir())
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == files
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (run / "hf" / name).read_bytes(), name
