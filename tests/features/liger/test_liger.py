"""--liger: which modules have a kernel, what is refused, and the kernels in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.liger import feature as liger
from fsdptrain.features.liger.feature import LigerFeature
from fsdptrain.features.liger.modules import Replacement, describe, find_replacements
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import install_policy_forward
from fsdptrain.model.probes.layout import LayoutProbe
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
        LigerFeature(max_tokens=64, compute_dtype=torch.float32).transform_model(zoo.meta("gpt2"), None)  # pyright: ignore


class RoundsOnce:
    """Stands in for liger_kernel.ops: float32 within each kernel."""

    class LigerRMSNormFunction:
        @staticmethod
        def apply(x: Tensor, weight: Tensor, eps: float, offset: float, *_: Any) -> Tensor:
            normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
            return ((weight.float() + offset) * normed).to(x.dtype)

    class LigerRopeFunction:
        factor = 1.0

        @classmethod
        def apply(cls, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
            found = []
            for x in (q.float(), k.float()):
                low, high = x.chunk(2, dim=-1)
                found.append(x * cos[:, None] + cls.factor * torch.cat([-high, low], dim=-1) * sin[:, None])
            return [x.to(q.dtype) for x in found]

    class LigerSiLUMulFunction:
        @staticmethod
        def apply(gate: Tensor, up: Tensor) -> Tensor:
            return (F.silu(gate.float()) * up.float()).to(up.dtype)


class ScaledGradient(torch.autograd.Function):
    """The identity with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return ctx.factor * upstream[0], None


def probe_in(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> LigerFeature:
    register_attention()
    model = zoo.build("qwen3", num_hidden_layers=12).to(dtype)
    model.set_attn_implementation(SEGMENTS)
    feature = LigerFeature(max_tokens=64, compute_dtype=dtype)
    feature.transform_model(model, None)  # pyright: ignore
    install_policy_forward(model, chunk_size=64)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", RoundsOnce)  # pyright: ignore
    feature.after_probe(model, LayoutProbe("packed", SEGMENTS, 0.0, 0.0), model.config.vocab_size)
    return feature


@pytest.mark.parametrize("factor", [1.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_rounding_is_accepted_and_an_error_is_not(
    dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundsOnce.LigerRopeFunction, "factor", factor)
    with nullcontext() if factor == 1.0 else pytest.raises(ConfigError, match="--liger changes the logprobs"):
        assert probe_in(dtype, monkeypatch).lines[0].startswith("liger kernels in 12 Qwen3Attention")


@pytest.mark.parametrize("factor", [0.0, 0.8, torch.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_a_wrong_gradient_of_small_weights_is_found(
    dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of norms have 1 to 4 % of the norm of all gradients."""
    norm = RoundsOnce.LigerRMSNormFunction.apply

    def wrong(x: Tensor, weight: Tensor, *options: Any) -> Tensor:
        return norm(x, ScaledGradient.apply(weight, factor), *options)  # pyright: ignore

    monkeypatch.setattr(RoundsOnce.LigerRMSNormFunction, "apply", wrong)
    with pytest.raises(ConfigError, match=r"the gradients of model\..*norm.weight by"):
        probe_in(dtype, monkeypatch)


def test_gradients_that_are_zero_are_compared() -> None:
    """Those of a LoRA matrix A, while B is zero."""
    model = torch.nn.Linear(2, 2, bias=False)
    for wrong in (0.0, 1.0):
        zeros, others = torch.zeros(2, 2), torch.full((2, 2), wrong)
        found, _ = liger._largest_difference(model, [(model.weight, others)], [(model.weight, zeros)], floor=1e-2)
        assert found > 1 if wrong else found == 0


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
