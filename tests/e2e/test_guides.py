"""The snippets of the guides run, on a tiny model; every command of "Your own task" runs on a real one."""

import re
import runpy
import shlex
import subprocess
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


@pytest.mark.matrix
def test_commands_of_your_own_task_print_what_the_page_shows(
    real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "HuggingFaceTB").mkdir()
    (tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct").symlink_to(real_model)
    page, _, _ = (DOCS / "own_task.md").read_text(encoding="utf-8").partition("## On one GPU")
    for name, code in re.findall(r"`(\w+\.py)`[^`]*:\n\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    steps = commands_with_output(page)
    assert len(steps) > 6
    for number, (words, shown) in enumerate(steps):
        printed = printed_by(words, tmp_path / f"log {number}")
        assert [line for line in shown if not is_among(line, printed)] == [], printed


def commands_with_output(page: str) -> list[tuple[list[str], list[str]]]:
    """Return the words of each indented command, with the lines that the page shows below it."""
    steps: list[tuple[list[str], list[str]]] = []
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE):
        if line.startswith(("python ", "fsdptrain ")):
            steps.append((shlex.split(line, comments=True), []))
        else:
            steps[-1][1].append(line)
    return steps


def printed_by(words: list[str], log: Path) -> str:
    """Run a command of a page, without an error."""
    if words[0] == "python":
        return subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=True).stdout
    result = command.run(words[1:], log, timeout=3600)
    assert result.code == 0, result.err
    return result.out + result.err


def is_among(shown: str, printed: str) -> bool:
    """Whether a line begins in this way. Numbers may differ, accuracies by at most 0.2."""

    def form(line: str) -> str:
        return re.sub(r"\d[\w.+-]*", "#", " ".join(line.split()))

    lines = [line for line in printed.splitlines() if form(line).startswith(form(shown))]
    if "acc" in shown:
        wanted, *found = ([float(x) for x in re.findall(r"(?<= )\d\.\d+", line)] for line in (shown, *lines))
        return any(one[: len(wanted)] == pytest.approx(wanted, abs=0.2) for one in found)
    return bool(lines)
