"""The snippets of the guides run, on a tiny model."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.command import metrics_of

DOCS = Path(__file__).parents[2] / "docs"
MODEL = "runs/quickstart/sft/hf"  # in the guides


def snippets(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def first_command(page: str) -> list[str]:
    """Return the arguments of the first `fsdptrain` command of a page, which may have several lines."""
    text = (DOCS / page).read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(r"^    fsdptrain (--.*)$", text, re.MULTILINE)
    assert found is not None
    return shlex.split(found[1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the reader has written so far, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words, reward, _ = snippets("tutorial_cpu.md")
    exec(words, {})
    (tmp_path / "rewards.py").write_text(reward)
    parts = [code for code in snippets("own_parts.md") if "Trainer" not in code]
    (tmp_path / "my_parts.py").write_text("\n\n".join(parts))
    return tmp_path


def test_a_run_takes_all_parts_of_the_guide(folder: Path, checkpoint: Path) -> None:
    flags = [str(checkpoint) if word == MODEL else word for word in first_command("own_parts.md")]
    flags += ["--reward-workers", "0"]  # processes take seconds to import the module
    result = command.run(flags, folder / "log", variables={"PYTHONPATH": str(folder)})
    assert result.code == 0, result.err
    assert "engine of" in result.out
    assert "parts 2" in result.out
    assert {"reward/right", "reward/short"} <= set(metrics_of(folder / "runs/parts")[-1])


def test_the_snippet_of_the_python_api_runs(folder: Path, checkpoint: Path) -> None:
    (code,) = (code for code in snippets("own_parts.md") if "Trainer" in code)
    (folder / "script.py").write_text(
        code.replace(MODEL, str(checkpoint)).replace("Config(", "Config(reward_workers=0, ")
    )
    try:
        runpy.run_path(str(folder / "script.py"))
    finally:
        sys.modules.pop("my_parts", None)
    assert metrics_of(folder / "runs/python")[-1]["step"] == 2


def test_the_reward_of_the_tutorial_gives_a_share_of_the_letters(folder: Path) -> None:
    letters = runpy.run_path(str(folder / "rewards.py"))["letters"]
    prompt = type("Prompt", (), {"label": "cba"})
    assert letters(prompt, "<think>x</think><answer>cba</answer>") == 1.0
    assert letters(prompt, "<answer>cbx</answer>") == pytest.approx(2 / 3)
    assert letters(prompt, "<answer>cb</answer>") == letters(prompt, "cba") == 0.0
