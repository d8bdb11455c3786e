"""The commands of the README are accepted, and no shell expands them."""

import re
import shlex
from pathlib import Path

import pytest

from fsdptrain.config import resolve

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
