"""--liger: which modules have a kernel, what is refused, and the kernels in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.liger import feature as liger
from fsdptrain.features.liger.feature import LigerFeature
from fsdptrain.features.liger.modules import Replacement, describe, find_replacements
from tests import zoo
from tests.matrix import only

INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("triton", "liger_kernel"))
WITH_KERNELS = {
    "llama": "2 LlamaAttention, 2 LlamaMLP, 5 LlamaRMSNorm",
    "qwen3": "2 Qwen3Attention, 9 Qwen3RMSNorm, 2 Qwen3MLP",
    "gemma3": "3 Gemma3Attention, 19 Gemma3RMSNorm, 3 Gemma3MLP",
    "mixtral": "2 MixtralAttention, 5 MixtralRMSNorm",  # its experts are not gated MLPs
    "glm4": "9 Glm4RMSNorm",  # rotates neighbors, and has one matrix for gate and up
    "qwen3_next": "4 Qwen3NextMLP, 11 Qwen3NextRMSNorm, 1 Qwen3NextAttention",  # not the norms with a gate
    "cohere": "2 CohereMLP",
    "gpt2": "",
}


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs triton and liger-kernel: Linux only")
@pytest.mark.parametrize("marked", only(["not matrix"], ["not matrix", "matrix"]))
def test_the_kernels_compute_what_the_modules_do(marked: str) -> None:
    """The cases of interpreter_cases.py."""
    cases = Path(__file__).with_name("interpreter_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, str(cases)]
    ran = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_modules_that_compute_the_formula_of_a_kernel_are_replaced(name: str) -> None:
    assert describe(find_replacements(zoo.meta(name))) == WITH_KERNELS[name]


@pytest.mark.parametrize(
    ("name", "variant"),
    [("llama", (0.0, "llama")), ("gemma2", (1.0, "gemma")), ("olmo2", (0.0, "gemma")), ("qwen3_next", (1.0, "gemma"))],
)
def test_norms_have_the_offset_and_the_casts_of_their_family(name: str, variant: tuple[float, str]) -> None:
    norms = [x for x in find_replacements(zoo.meta(name)) if "Norm" in type(x.module).__name__]
    assert {norm_variant(norm) for norm in norms} == {variant}


def norm_variant(norm: Replacement) -> tuple[float, str]:
    """The last two arguments of the kernel before `in_place`."""
    found: list[Any] = []
    kernels: Any = type("Kernels", (), {})
    kernels.LigerRMSNormFunction = type("Norm", (), {"apply": staticmethod(lambda *args: found.extend(args))})
    norm.forward(kernels)(None)
    return found[3], found[4]


def test_a_model_without_such_modules_is_refused() -> None:
    with pytest.raises(ConfigError, match="--liger has no kernel for norms, rotary embeddings or MLPs of GPT2LMHead"):
        LigerFeature(max_tokens=64).transform_model(zoo.meta("gpt2"), None)  # pyright: ignore


@pytest.mark.parametrize(
    ("missing", "words"), [("liger_kernel", "pip install 'fsdptrain\\[liger\\]'"), ("triton", "the package triton")]
)
def test_without_a_package_it_is_refused(missing: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ConfigError, match=f"^--liger needs .*{words}"):
        LigerFeature.check(Config(hf_checkpoint="any", liger=True))


@pytest.mark.skipif(not INSTALLED, reason="needs triton and liger-kernel: Linux only")
def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger.platform, "has_accelerator", lambda: False)
    with pytest.raises(ConfigError, match=r"^--liger needs a GPU and none is available: leave it out$"):
        LigerFeature.check(Config(hf_checkpoint="any", liger=True))
