"""The real command in a process of its own: quick, quiet, and honest about every mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fsdptrain.cli import DESCRIPTION
from fsdptrain.config import Config, load_recipe

ROOT = Path(__file__).parents[2]
MODEL = ["--hf-checkpoint", "Qwen/Qwen3-4B"]


def fsdptrain(*argv, **environment):
    """Run `python -m fsdptrain` from the root of the repository."""
    command = [sys.executable, "-m", "fsdptrain", *argv]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_help_shows_every_flag():
    done = fsdptrain("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for flag in (
        "--recipe",
        "--hf-checkpoint",
        "--fsdp-cpu-offload",
        "--no-bf16",
        "--rollout-max-response-len",
        "--dry-run",
    ):
        assert flag in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "argv",
    [["--help"], [*MODEL, "--dry-run"], ["export", "--help"], ["report", "--help"], ["--no-such-flag"], ["--version"]],
)
def test_torch_is_not_imported_to_answer(argv):
    program = (
        "import sys; from fsdptrain.cli import run; run(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_help_fits_into_80_columns():
    """The description is printed as it is: a line that is too long would be broken in the middle of a word."""
    shown = fsdptrain("--help", COLUMNS="80").stdout
    assert all(len(line) <= 80 for line in shown.splitlines())
    for line in DESCRIPTION.splitlines():
        assert line in shown.splitlines()


@pytest.mark.parametrize("argv", [["help"], ["-h"], ["--lr", "1", "--help"]])
def test_help_has_many_names(argv):
    assert fsdptrain(*argv).stdout == fsdptrain("--help").stdout


def test_importing_the_package_does_not_import_torch():
    program = "import sys, fsdptrain; fsdptrain.Config, fsdptrain.load_recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300).returncode == 0


def test_a_dry_run_prints_a_recipe_with_the_source_of_each_value(tmp_path):
    done = fsdptrain(*MODEL, "--fsdp-cpu-offload", "--lr", "2e-6", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["optim"]["lr"] == 2e-6
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["cpu_offload:", "true", "#", "flag"] in lines
    assert ["prefetch:", "true", "#", "default"] in lines
    assert "\x1b" not in done.stdout
    (tmp_path / "r.yaml").write_text(done.stdout)
    assert load_recipe(tmp_path / "r.yaml") == Config(hf_checkpoint="Qwen/Qwen3-4B", fsdp_cpu_offload=True, lr=2e-6)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "--hf-checkpoint is missing: the model to train, e.g. --hf-checkpoint Qwen/Qwen3-4B or a local folder"),
        (["--hf-chekpoint", "x"], "unknown flag --hf-chekpoint; did you mean '--hf-checkpoint'?"),
        ([*MODEL, "--global-batch-size", "100"], "--global-batch-size 100 must divide --rollout-batch-size 32 x "),
        (["--recipe", "none.yaml"], "--recipe none.yaml cannot be read: No such file or directory"),
        (["export"], "--checkpoint is missing, e.g. fsdptrain export --checkpoint runs/Qwen3-4B-grpo/checkpoints/"),
        (["export", "--chekpoint", "x"], "unknown flag --chekpoint; did you mean '--checkpoint'?"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(argv, line):
    done = fsdptrain(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fsdptrain: {line}")
    assert done.stderr.count("\n") == 1
