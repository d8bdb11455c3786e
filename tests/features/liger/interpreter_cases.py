"""The kernels of liger-kernel, in Triton's interpreter, in place of the modules of small models.

test_liger.py runs this file in a process with TRITON_INTERPRET=1, which Triton reads when it is first imported.
"""

import sys
from pathlib import Path
from typing import Any

import liger_kernel.ops as kernels
import pytest
import torch
from transformers import PreTrainedModel

from fsdptrain.algo.losses import LOSSES
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Features
from fsdptrain.features.activation_memory.checkpointing import enable_gradient_checkpointing
from fsdptrain.features.liger.feature import _BLOCK_ROWS, LigerFeature
from fsdptrain.features.liger.modules import _replacements, find_replacements
from fsdptrain.features.lora.adapters import add_adapters
from fsdptrain.features.lora.config import LoraConfig
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import install_policy_forward, policy_logprobs
from fsdptrain.model.probes.layout import choose_layout
from fsdptrain.types import LossConfig
from tests import zoo
from tests.distributed.test_fsdp_backend import config, packs_of_this_rank, samples
from tests.features.liger import interpreter
from tests.seam import CPU, gradients, random_pack
from tests.testing import save_tiny_checkpoint, spawn

interpreter.complete()
NO_MESHES: Any = None


def model_of(name: str, *, selective: bool = False, adapter: bool = False) -> tuple[PreTrainedModel, LigerFeature]:
    """A model and its feature before the probe."""
    register_attention()
    model = zoo.build(name)
    model.set_attn_implementation(SEGMENTS)
    if adapter:
        add_adapters(model, LoraConfig(rank=4))
        for module in model.modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    module.register_parameter(key, torch.nn.Parameter(0.1 * torch.randn(parameter.shape)))
    feature = LigerFeature(max_tokens=64, compute_dtype=torch.float32)
    feature.transform_model(model, NO_MESHES)
    if selective:
        enable_gradient_checkpointing(model, kind="selective")
    install_policy_forward(model, chunk_size=16, features=Features([feature]))
    return model, feature


def probe(model: PreTrainedModel, feature: LigerFeature) -> None:
    model.zero_grad()
    layout = choose_layout(model, "auto", vocab_size=zoo.VOCAB_SIZE, compute_dtype=torch.float32, device=CPU)
    feature.after_probe(model, layout, zoo.VOCAB_SIZE)


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.matrix)


def step(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    batch = random_pack((9, 5))
    values = policy_logprobs(model, batch, layout="packed").values
    return {"": values.detach()} | gradients(model, (values * (batch.position_ids + 1).sin()).sum())


@pytest.mark.parametrize(
    ("name", "options", "classes"),
    [
        ("qwen3", {"selective": True}, "2 Qwen3Attention, 9 Qwen3RMSNorm, 2 Qwen3MLP"),
        _slow("llama", {"selective": True}, "2 LlamaAttention, 2 LlamaMLP, 5 LlamaRMSNorm"),
        _slow("llama", {"adapter": True}, "2 LlamaAttention, 2 LlamaMLP, 5 LlamaRMSNorm"),
        ("gemma2", {}, "2 Gemma2Attention, 2 Gemma2MLP, 9 Gemma2RMSNorm"),
        _slow("deepseek_v3", {}, "2 DeepseekV3Attention, 9 DeepseekV3RMSNorm, 2 DeepseekV3MLP"),
    ],
)
def test_logprobs_and_gradients_are_those_of_the_stock_modules(
    name: str, options: dict[str, bool], classes: str
) -> None:
    """Selective checkpointing keeps the inputs of the rotary embedding, over which its kernel writes."""
    model, feature = model_of(name, **options)
    wanted = step(model)
    stock = {replacement.module: replacement.module.forward for replacement in find_replacements(model)}
    assert all(module.forward == forward for module, forward in stock.items()), "nothing is replaced before the probe"
    probe(model, feature)
    assert classes in feature.lines[0]
    found = step(model)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (found[key] - value).abs().max() <= 2e-5 * value.abs().max().clamp(min=1e-3), key
    other = zoo.meta(name)
    assert not any("forward" in vars(module) for module in other.modules()), "another model of the family"
    attention = type(other.model.layers[0].self_attn)
    assert attention.forward.__globals__ is vars(sys.modules[attention.__module__])
    assert attention.forward.__globals__["apply_rotary_pos_emb"].__module__ == attention.__module__


@pytest.mark.matrix
def test_heads_of_many_rows_have_a_kernel_of_their_own() -> None:
    """It is used from 32,768 rows on, which the probe on a GPU reaches."""
    x, upstream = torch.randn(_BLOCK_ROWS, 4), torch.randn(_BLOCK_ROWS, 4)
    model = zoo.build("llama")
    norm = type(model.model.norm)(4)
    (replacement,) = _replacements(norm)

    def results() -> list[torch.Tensor]:
        value = norm(x.requires_grad_())
        return [value.detach(), *torch.autograd.grad(value, [x, norm.weight], upstream)]

    wanted = results()
    replacement.install(kernels)
    for found, other in zip(results(), wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-3)


ROPE, PRODUCT, NORM = kernels.LigerRopeFunction, kernels.LigerSiLUMulFunction, kernels.LigerRMSNormFunction


class WrongRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return ROPE.forward(ctx, q, k, cos, 0.9 * sin)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return ROPE.backward(ctx, *upstream)[:4]


class WrongGradientOfProduct(PRODUCT):
    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        first, *others = PRODUCT.backward(ctx, *upstream)
        return 1.01 * first, *others


class WrongGradientOfNorm(NORM):
    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        of_input, of_weight, *others = NORM.backward(ctx, *upstream)
        return of_input, 0.9 * of_weight, *others


class NanGradientOfNorm(NORM):
    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        of_input, of_weight, *others = NORM.backward(ctx, *upstream)
        return of_input, torch.nan * of_weight, *others


def step_of_a_rank(checkpoint: str, values: dict[str, Any]) -> dict[str, float]:
    backend = FSDPBackend(config(checkpoint, **values), total_steps=10)
    return backend.train_step(packs_of_this_rank(samples(seed=0)[:2], 256), LOSSES["grpo"], LossConfig())


@pytest.mark.matrix
def test_two_ranks_train_as_without(tmp_path: Path) -> None:
    checkpoint = str(save_tiny_checkpoint(tmp_path, num_hidden_layers=1))
    found, wanted = (spawn(2, step_of_a_rank, checkpoint, {"liger": liger})[0] for liger in (True, False))
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        raise RuntimeError("out of shared memory")


@pytest.mark.parametrize(
    ("kernel", "wrong", "words"),
    [
        ("LigerRopeFunction", WrongRope, "changes the logprobs of LlamaForCausalLM by"),
        _slow("LigerSiLUMulFunction", WrongGradientOfProduct, "the gradients of .* by"),
        ("LigerRMSNormFunction", WrongGradientOfNorm, r"the gradients of model.*norm.weight by 0.1 of"),
        ("LigerRMSNormFunction", NanGradientOfNorm, r"the gradients of model.*norm.weight by inf of"),
        ("LigerRMSNormFunction", Raising, "--liger does not work with LlamaForCausalLM: RuntimeError: out of shared"),
    ],
)
def test_the_probe_finds_a_wrong_kernel(kernel: str, wrong: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, feature = model_of("llama")
    monkeypatch.setattr(kernels, kernel, wrong)
    with pytest.raises(ConfigError, match=words) as caught:
        probe(model, feature)
    assert "--liger" in str(caught.value)
    assert "\n" not in str(caught.value)
