"""The device that is asked for, and an installed package that brings a kernel for it, on the real command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptrain.overrides import GROUP
from tests.e2e import command
from tests.packages import install

KERNEL = """
from fsdptrain.model.attention.attention import segment_attention
from pathlib import Path

def attention(q, k, v, *, scale, dropout, window, softcap, sinks):
    (Path(__file__).parent / "called").touch()
    options = {"scale": scale, "dropout": dropout, "window": window, "softcap": softcap, "sinks": sinks}
    return segment_attention.original(q, k, v, **options)
"""
KEY = "fsdptrain.model.attention.attention.segment_attention"


def in_its_own_process(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """`python -m fsdptrain`, which finds the packages in `folder`."""
    paths = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "fsdptrain", *argv]
    return subprocess.run(line, env=variables, capture_output=True, text=True, timeout=120, cwd=folder, check=False)


def test_a_run_trains_with_the_kernel_of_an_installed_package_and_says_so(tmp_path: Path, checkpoint: Path):
    install(tmp_path, "acme", GROUP, [f"cpu.{KEY} = acme_kernels:attention"], {"acme_kernels": KERNEL})
    flags = ("--hf-checkpoint", str(checkpoint), *command.TINY_RUN, "console", "--num-rollout", "1")
    result = in_its_own_process(tmp_path, *flags, "--output-dir", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert f"override: {KEY}: acme_kernels:attention of acme 1.0" in result.stderr
    assert (tmp_path / "called").exists()


@pytest.mark.matrix
def test_inspect_lists_what_is_replaced(tmp_path: Path, checkpoint: Path):
    install(tmp_path, "acme", GROUP, [f"cpu.{KEY} = acme_kernels:attention"], {"acme_kernels": KERNEL})
    result = in_its_own_process(tmp_path, "inspect", "--hf-checkpoint", str(checkpoint), "--json")
    assert result.returncode == 0, result.stderr
    assert f'"key": "{KEY}"' in result.stdout
    assert (tmp_path / "called").exists()  # by the probe


def test_a_broken_package_ends_the_run_in_one_line(tmp_path: Path, checkpoint: Path):
    install(tmp_path, "acme", GROUP, [f"cpu.{KEY} = acme_kernels:attention"], {"acme_kernels": "import not_there"})
    result = in_its_own_process(tmp_path, "inspect", "--hf-checkpoint", str(checkpoint))
    assert result.returncode == 2
    assert result.stderr.startswith(
        f"fsdptrain: plug-in cpu.{KEY} = acme_kernels:attention of acme 1.0 cannot be loaded"
    )
    assert result.stderr.count("\n") == 1


def test_a_device_that_is_not_here_is_one_line(tmp_path: Path, checkpoint: Path):
    flags = ["--hf-checkpoint", str(checkpoint), *command.TINY_RUN, "console", "--output-dir", str(tmp_path / "run")]
    process = command.start(flags, tmp_path, {"FSDPTRAIN_PLATFORM": "xpu"})
    process.join(60)
    assert process.exitcode == 2
    error = (tmp_path / "err").read_text()
    assert error.startswith("fsdptrain: FSDPTRAIN_PLATFORM=xpu: torch finds no such device on this machine; it takes")
    assert error.count("\n") == 1
