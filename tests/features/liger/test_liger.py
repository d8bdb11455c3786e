"""--liger: what is refused, and the kernels in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.liger import feature as liger
from fsdptrain.features.liger.feature import LigerFeature
from tests import zoo

INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("triton", "liger_kernel"))


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs triton and liger-kernel: Linux only")
def test_the_kernels_compute_what_the_modules_do() -> None:
    """The cases of interpreter_cases.py."""
    cases = Path(__file__).with_name("interpreter_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    ran = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.skipif(not INSTALLED, reason="needs triton and liger-kernel: Linux only")
def test_without_a_gpu_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.meta("qwen3").config.save_pretrained(tmp_path)
    monkeypatch.setattr(liger.platform, "has_accelerator", lambda: False)
    with pytest.raises(ConfigError, match=r"^--liger needs a GPU and none is available: leave it out$"):
        LigerFeature.create(Config(hf_checkpoint="any", liger=True), tmp_path)
