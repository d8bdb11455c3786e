"""The core works without the optional folders: a dense GRPO run finishes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing import save_tiny_checkpoint

ROOT = Path(__file__).parents[2]
OPTIONAL = ("agents", "features", "vllm", "megatron", "tools")
WITHOUT_EDITABLE = """
import sys  # an editable install of this repository finds the folders that the copy lacks
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package without its optional folders."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "fsdptrain", folder / "fsdptrain", ignore=shutil.ignore_patterns(*OPTIONAL, "__pycache__"))
    (folder / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    return folder


def python(core: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=core, env=environment, capture_output=True, text=True, timeout=240)


def test_a_dense_run_finishes(core: Path, tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "model")
    flags = f"--hf-checkpoint {tmp_path}/model --output-dir {tmp_path}/run --no-bf16 --num-rollout 2 --reward-workers 0"
    flags += " --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 8 --eval-interval 0"
    result = python(core, "-m", "fsdptrain", *flags.split())
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    assert not any((core / "fsdptrain" / name).exists() for name in OPTIONAL)


def test_options_of_features_are_unknown(core: Path) -> None:
    flags = ("--lora-rank 8", "--context-parallel-size 2", "--rollout-urls http://a:1", "--megatron-spec a:b")
    program = (
        "import sys; from fsdptrain.cli import run; [run(['--hf-checkpoint', 'x', *f.split()]) for f in sys.argv[1:]]"
    )
    found = python(core, "-c", program, *flags).stderr.splitlines()
    assert [line.split(";")[0] for line in found] == [f"fsdptrain: unknown flag {one.split()[0]}" for one in flags]
