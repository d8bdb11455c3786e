"""The kernels of liger-kernel, in Triton's interpreter, in place of the modules of small models.

test_liger.py runs this file in a process with TRITON_INTERPRET=1, which Triton reads when it is first imported.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from liger_kernel import ops
from liger_kernel.transformers import rms_norm
from transformers import PreTrainedModel
from triton.runtime import interpreter

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.features.liger.feature import LigerFeature
from fsdptrain.model.probes.layout import choose_layout
from tests import zoo
from tests.seam import CPU, logprobs_and_gradients, policy_model, random_pack


def complete() -> None:
    """Give Triton's interpreter what it lacks for these kernels: arguments that are numbers, and libdevice."""
    stock = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return stock(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = with_floats
    ops.rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # of the interpreter, while a kernel runs
    ops.geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


complete()


def model_of(name: str) -> tuple[PreTrainedModel, LigerFeature]:
    """A model and its feature before the probe."""
    feature = LigerFeature(compute_dtype=torch.float32)
    return policy_model(name, more=[feature]), feature


def probe(model: PreTrainedModel, feature: LigerFeature) -> None:
    model.zero_grad()
    layout = choose_layout(model, "auto", vocab_size=zoo.VOCAB_SIZE, compute_dtype=torch.float32, device=CPU)
    feature.verify(model, layout, zoo.VOCAB_SIZE)


def test_logprobs_and_gradients_are_those_of_the_stock_modules() -> None:
    model, feature = model_of("qwen3")
    wanted = logprobs_and_gradients(model, random_pack((9, 5)))
    probe(model, feature)
    assert sum("Liger" in module._get_name() for module in model.modules()) >= 7
    found = logprobs_and_gradients(model, random_pack((9, 5)))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (found[key] - value).abs().max() <= 2e-5 * value.abs().max().clamp(min=1e-3), key
    other = zoo.meta("qwen3")
    assert not any("Liger" in module._get_name() for module in other.modules()), "another model of the family"


def test_a_model_that_liger_does_not_know_is_refused(tmp_path: Path) -> None:
    zoo.meta("gpt2").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--liger has no kernels for models of type gpt2: leave it out"):
        LigerFeature.create(Config(hf_checkpoint="any", liger=True), tmp_path)


NORM = rms_norm.LigerRMSNormFunction


class WrongGradientOfNorm(NORM):
    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        of_input, of_weight, *others = NORM.backward(ctx, *upstream)
        return of_input, 0.9 * of_weight, *others


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        raise RuntimeError("out of shared memory")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (WrongGradientOfNorm, r"a gradient by 0.1 of"),
        (Raising, "--liger does not work with LlamaForCausalLM: RuntimeError: out of shared"),
    ],
)
def test_the_probe_finds_a_wrong_kernel(wrong: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, feature = model_of("llama")
    monkeypatch.setattr(rms_norm, NORM.__name__, wrong)
    with pytest.raises(ConfigError, match=words) as caught:
        probe(model, feature)
    assert "--liger" in str(caught.value)
    assert "\n" not in str(caught.value)
