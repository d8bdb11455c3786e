"""Every fallback is reported with its reason, and nothing else is."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.model.attention.attention import SEGMENTS, VARLEN, register_attention
from fsdptrain.model.probes.kernels import Kernel, kernels, require_no_fallback
from fsdptrain.model.probes.layout import LayoutProbe
from tests import zoo


def on_meta(name: str, attention: str, **changes: Any) -> PreTrainedModel:
    register_attention()
    return zoo.meta(name, attn_implementation=attention, **changes)


def fallbacks(model: PreTrainedModel, device: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[Kernel]:
    return [k for k in kernels(model, device_type=device, compute_dtype=dtype, **options) if k.fell_back]


@pytest.mark.parametrize("name", [name for name in zoo.ARCHITECTURES if name != "qwen3_next"])
def test_attention_models_have_no_fallback_on_a_cpu(name: str):
    assert fallbacks(on_meta(name, SEGMENTS), "cpu") == []


def test_a_recurrent_mixer_without_its_packages_falls_back_to_torch_and_strict_names_all_fallbacks():
    model, packages = on_meta("qwen3_next", SEGMENTS), ["causal-conv1d", "flash-linear-attention"]
    found = [(k.part, k.used, k.wanted) for k in fallbacks(model, "cpu")]
    assert found == [("recurrent mixer", "torch", package) for package in packages]
    with pytest.raises(ConfigError, match=f"--strict .*{packages[0]}.*{packages[1]}"):
        require_no_fallback(kernels(model, device_type="cpu", compute_dtype=torch.float32))
    require_no_fallback(kernels(on_meta("qwen3", SEGMENTS), device_type="cpu", compute_dtype=torch.float32))


@pytest.mark.parametrize(
    ("name", "dtype", "changes", "reason"),
    [
        ("gpt_oss", torch.bfloat16, {}, "sinks"),
        ("gemma2", torch.bfloat16, {}, "softcap"),
        ("qwen3", torch.float32, {}, "it needs bfloat16 or float16"),
        ("qwen3", torch.bfloat16, {"head_dim": 264}, "heads of 264 are over its 256"),
    ],
)
def test_what_the_varlen_kernel_does_not_support_falls_back(name: str, dtype: torch.dtype, changes: Any, reason: str):
    assert fallbacks(on_meta("qwen3", VARLEN), "cuda") == []
    [kernel] = fallbacks(on_meta(name, VARLEN, **changes), "cuda", dtype)
    assert kernel.part == "attention"
    assert reason in kernel.reason


def test_eager_experts_are_a_fallback():
    model = on_meta("qwen3_moe", SEGMENTS)
    assert fallbacks(model, "cpu") == []
    model.set_experts_implementation("eager")
    [kernel] = fallbacks(model, "cpu")
    assert (kernel.part, kernel.wanted) == ("experts", "grouped_mm")


def test_a_padded_layout_is_a_fallback_with_the_reason_of_the_probe():
    probe = LayoutProbe("padded", SEGMENTS, 1e-6, 1e-4, "packed with fsdptrain_segments: differs by 3.1")
    [kernel] = fallbacks(on_meta("qwen3", SEGMENTS), "cpu", probe=probe)
    assert kernel.line == "layout: padded instead of packed (packed with fsdptrain_segments: differs by 3.1)"
