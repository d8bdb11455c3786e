"""A run with the fused kernels in Triton's interpreter, and the error on a CPU without it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import TINY_RUN, metrics_of, run, trained

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: Linux only")


@pytest.mark.matrix
def test_a_run_with_the_kernels_has_the_metrics_of_one_without(checkpoint: Path, tmp_path: Path) -> None:
    argv = ["--hf-checkpoint", str(checkpoint), *TINY_RUN, "--entropy-coef", "0.01"]
    rows = {}
    for kernel, variables in (("triton", {"TRITON_INTERPRET": "1"}), ("eager", {})):  # read when triton is imported
        command = [sys.executable, "-m", "fsdptrain", *argv, "--output-dir", str(tmp_path / kernel)]
        command += ["--logprob-kernel", kernel]
        ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        assert ("logprob kernel: triton" in ended.stdout + ended.stderr) == (kernel == "triton")
        rows[kernel] = trained(metrics_of(tmp_path / kernel))
    for fused, eager in zip(rows["triton"], rows["eager"], strict=True):
        for name in ("loss/total", "optim/grad_norm", "policy/entropy"):
            assert fused[name] == pytest.approx(eager[name], rel=1e-4, abs=1e-6), name


@pytest.mark.matrix
def test_inspect_reports_the_kernels(checkpoint: Path) -> None:
    argv = ["inspect", "--hf-checkpoint", str(checkpoint), "--logprob-kernel", "triton", "--json"]
    command, variables = [sys.executable, "-m", "fsdptrain", *argv], os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    kernels = json.loads(ended.stdout)["kernels"]
    assert [kernel["used"] for kernel in kernels if kernel["part"] == "logprobs"] == ["triton"]


def test_a_cpu_refuses_the_kernels_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--output-dir", str(tmp_path / "run"), "--logprob-kernel", "triton"]
    inspect = ["inspect", "--hf-checkpoint", str(checkpoint), "--logprob-kernel", "triton"]
    for argv in (["--hf-checkpoint", str(checkpoint), *TINY_RUN, *options], inspect):
        ended = run(argv, tmp_path / "log")
        assert ended.code == 2
        assert "--logprob-kernel triton cannot be used: Triton does not run on cpu; use --logprob-ker" in ended.err
