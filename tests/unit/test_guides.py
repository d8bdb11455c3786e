"""Commands, flags and error lines of the guides exist. What the snippets do: tests/e2e/test_guides.py."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from fsdptrain.config import resolve
from fsdptrain.config.keys import all_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = ("get_started", "tutorial_*", "guide_*", "agents", "distillation", "evaluation", "sft")
GUIDES = sorted(path for name in NAMES for path in DOCS.glob(f"{name}.md"))
OTHERS = ["coming_from_trl.md", "coming_from_verl.md", "coming_from_prime_rl.md"]
OF_COMMANDS = {"--recipe", "--help", "--help-all", "--json", "--rollouts", "--num-gpus", "--gpu-memory-gib", "--output"}
OF_COMMANDS |= {"--checkpoint", "--host-memory-gib"}
ELLIPSIS = "..."


def indented_commands(page: Path) -> list[str]:
    """Return the shell commands of indented blocks, each in one line."""
    lines = re.findall(r"^    (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+# .*$", "", line) for line in whole]


def commands(page: Path) -> list[str]:
    """Return the arguments of fsdptrain in each of its commands."""
    begin = re.compile(r"^(?:\S*/)?fsdptrain (?=[-a-z])|^torchrun .*? -m fsdptrain ")
    return [line[found.end() :].strip() for line in indented_commands(page) if (found := begin.match(line))]


README = ROOT / "README.md"
PAGES = [README, *GUIDES, *map(DOCS.joinpath, OTHERS)]
ALL_COMMANDS = [(page.name, line) for page in PAGES for line in commands(page)]


def test_there_are_commands() -> None:
    assert len(ALL_COMMANDS) > 40
    assert {page for page, _ in ALL_COMMANDS} >= {page.name for page in GUIDES}


@pytest.mark.parametrize(("page", "line"), ALL_COMMANDS)
def test_a_command_of_a_guide_is_accepted(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flag exists. A whole training command is accepted with its values."""
    flags = {word.partition("=")[0] for word in shlex.split(line) if word.startswith("--")}
    assert flags <= known_flags() | {f"--no-{flag[2:]}" for flag in known_flags()}
    if line.startswith("--") and ELLIPSIS not in line and is_here(line):
        monkeypatch.chdir(ROOT)
        assert resolve(shlex.split(line)).config.model.hf_checkpoint


def test_no_command_of_the_readme_is_expanded_by_a_shell() -> None:
    """`?` and `*` outside quotes stop zsh with `no matches found`."""
    for line in commands(README):
        assert not set("?*[") & set(re.sub(r"'[^']*'", "", line)), line


def is_here(line: str) -> bool:
    """Whether the command has no recipe, or one of the package."""
    words = shlex.split(line)
    return "--recipe" not in words or (ROOT / f"fsdptrain/recipes/{words[words.index('--recipe') + 1]}.yaml").is_file()


@pytest.mark.parametrize("page", [*GUIDES, *map(DOCS.joinpath, [*OTHERS, "troubleshooting.md"])], ids=lambda p: p.name)
def test_flags_in_prose_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = {flag for code in re.findall(r"`(--[^`]+)`", text) for flag in re.findall(r"--[a-z][\w-]*", code)}
    unknown = named - known_flags() - {f"--no-{flag[2:]}" for flag in known_flags()}
    assert unknown <= OF_OTHER_PROGRAMS


OF_OTHER_PROGRAMS = {
    *("--constraint", "--dry-run", "--ignore-installed"),  # pip
    *("--nnodes", "--rdzv-endpoint", "--rdzv-id"),  # torchrun
    *("--generation-config", "--shm-size", "--tasks", "--include_path"),  # vLLM, docker, lm_eval
}


@cache
def known_flags() -> set[str]:
    return {key.flag for key in all_keys().values()} | OF_COMMANDS


ERRORS = re.findall(r"^```error\n(.*?)^```", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE | re.DOTALL)
ERROR_LINES = [line for block in ERRORS for line in block.splitlines()]


def test_there_are_error_lines() -> None:
    assert len(ERROR_LINES) > 30


@pytest.mark.parametrize("line", ERROR_LINES)
def test_an_error_line_of_the_troubleshooting_page_is_printed_somewhere(line: str) -> None:
    """`...` stands for what a placeholder is filled with. The rest is one text of the sources, with them in order."""
    parts = [part for part in (part.strip() for part in line.split(ELLIPSIS)) if len(part) > 1]
    assert parts
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    assert any(pattern.search(text) for text in texts())


@cache
def texts() -> list[str]:
    """Return every text of the sources, with a NUL for each placeholder."""
    found = []
    for path in (ROOT / "fsdptrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:\.\d+)?[sdg]", "\0", node.value))
    return found
