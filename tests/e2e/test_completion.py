"""Shell completion: the script of bash completes in a real bash; those of zsh and fish hold the same words."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fsdptrain.cli import COMMANDS
from fsdptrain.config.shipped import recipe_names
from fsdptrain.tools.completion import completion, find_words

PROGRAM = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_fsdptrain
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "completion.bash"
    path.write_text(completion("bash", list(COMMANDS)))
    return path


def complete(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of the `words` after fsdptrain."""
    argv = ["bash", "-c", PROGRAM, "bash", str(script), "fsdptrain", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pl"], ["plan"]),
        (["--kl-l"], ["--kl-loss-coef", "--kl-loss-type"]),
        (["--no-bf"], ["--no-bf16"]),
        (["--algorithm", "gs"], ["gspo"]),
        (["--algorithm", "=", "gs"], ["gspo"]),  # bash splits at =
        (["--lr", "1", "--sft-loss-on", ""], ["assistant", "last", "all"]),
        (["--reward", "ma"], ["math"]),
        (["--recipe", "spell"], ["spell_backward_demo", "spell_backward_sft_demo"]),
        (["recipes", "show", "spell_backward_s"], ["spell_backward_sft_demo"]),
        (["plan", "--num-g"], ["--num-gpus"]),
        (["--num-g"], []),
        (["eval", "--checkp"], ["--checkpoint"]),
        (["export", "--lora-e"], ["--lora-export"]),
        (["export", "--lr"], []),
        (["demo", "--warm"], ["--warm-up-steps"]),
        (["--print-completion", "f"], ["fish"]),
        (["--prompt-data", "x"], []),  # then bash completes files
    ],
)
def test_bash_completes(script: Path, words: list[str], offered: list[str]) -> None:
    assert complete(script, *words) == offered


def test_bash_completes_every_command(script: Path) -> None:
    assert complete(script, "") == list(COMMANDS)


def test_recipe_names_are_those_of_the_package(script: Path) -> None:
    assert complete(script, "--recipe", "") == recipe_names()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_holds_all_words_and_parses(shell: str, tmp_path: Path) -> None:
    text, words = completion(shell, list(COMMANDS)), find_words(list(COMMANDS))
    prefix = "-l " if shell == "fish" else "--"
    found = set(re.findall(prefix + r"([a-z][a-z0-9-]*)", text))
    assert found >= {flag[2:] for flags in words.flags.values() for flag in flags}
    for values in words.choices.values():
        assert all(value in text for value in values)
    if shell == "fish":
        assert all(line.startswith("complete -c fsdptrain ") for line in text.splitlines())
        assert all(line.count("'") % 2 == 0 for line in text.splitlines())
    if shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(text)
        subprocess.run([shell, "-n", path], timeout=60, check=True)
