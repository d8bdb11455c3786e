"""Targets of an adapter in every family. Weights that cannot have one are refused in one line."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fsdptrain.config import Config
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.features.lora.adapters import add_adapters
from fsdptrain.features.sections import LoraConfig
from fsdptrain.trainer.speed import model_flops
from tests import zoo
from tests.matrix import only


@pytest.mark.parametrize("name", only(["qwen3_next", "gpt_oss"], zoo.ARCHITECTURES))
def test_all_linear_is_every_linear_layer_but_the_head_and_detached_restores_the_model(name):
    model = zoo.meta(name)
    stock = {name: id(p) for name, p in model.named_parameters()}
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}

    adapters = add_adapters(model, LoraConfig(rank=4))

    assert adapters.layers.keys() == {f"{n}.weight" for n in linear if n != "lm_head"}
    assert {p.requires_grad for n, p in model.named_parameters() if "lora_" not in n} == {False}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with adapters.detached():
        assert {name: id(p) for name, p in model.named_parameters()} == stock
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if "lora_" in n
    }


REFUSED = [
    ("qwen3", {"targets": ["q_porj"]}, ["--lora-targets q_porj", "'q_proj'"]),
    ("qwen3", {"targets": ["lm_head"]}, ["lm_head.weight", "remove it"]),
    ("qwen2", {"targets": ["embed_tokens"]}, ["embed_tokens.weight", "remove it"]),
    ("qwen3", {"targets": ["norm"]}, ["norm.weight", "not a matrix"]),
    ("qwen3", {"modules_to_save": ["lm_haed"]}, ["--lora-modules-to-save lm_haed", "'lm_head'"]),
    ("qwen3", {"modules_to_save": ["mlp"]}, ["--lora-targets both name model.layers.0.mlp.down_proj.weight"]),
]


@pytest.mark.parametrize(("name", "values", "named"), REFUSED, ids=[str(values) for _, values, _ in REFUSED])
def test_weights_that_cannot_have_an_adapter_are_refused_in_one_line(name, values, named):
    with pytest.raises(ConfigError) as caught:
        add_adapters(zoo.meta(name), LoraConfig(rank=4, **values))
    line = str(caught.value)
    assert "\n" not in line
    assert [part for part in named if part not in line] == []


@pytest.mark.parametrize(
    ("flags", "changes", "line"),
    [
        ({"lora_rank": 8}, {}, "--lora-rank 8 contradicts --lora-init .*, which has 4: remove it"),
        ({}, {"use_dora": True}, "--lora-init .* has use_dora True, which is not supported"),
        ({}, {"init_lora_weights": "pissa"}, "--lora-init .* has init_lora_weights 'pissa', which is not"),
        ({}, {}, "adapter_model.safetensors: adapter_model.bin is a pickle"),
        ({"lora_alpha": 16}, {"lora_alpha": 16, "modules_to_save": ["lm_head"]}, ""),
    ],
)
def test_the_options_are_those_of_the_folder_or_refused_in_one_line(tmp_path: Path, flags, changes, line):
    options = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(options | changes))
    (tmp_path / f"adapter_model.{'bin' if 'pickle' in line else 'safetensors'}").touch()
    with pytest.raises(CheckpointError, match=f"^[^\n]*{line}[^\n]*$") if line else nullcontext():
        lora = Config(hf_checkpoint="x", lora_init=str(tmp_path), **flags).section(LoraConfig)
        assert (lora.rank, lora.alpha, lora.targets, lora.modules_to_save) == (4, 16, ["q_proj"], ["lm_head"])


def test_flops_have_no_gradient_of_frozen_weights():
    model = zoo.meta("qwen3")
    whole = model_flops(model)
    add_adapters(model, LoraConfig(rank=4))
    adapted = model_flops(model)
    lengths = ([10, 20], 25)
    assert adapted.forward(*lengths, causal=True) == whole.forward(*lengths, causal=True)
    products = 2 * (whole.body_weights * 30 + whole.head_weights * 25)
    assert whole.training(*lengths, causal=True) - adapted.training(*lengths, causal=True) == products
