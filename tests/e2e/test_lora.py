"""Whole runs that train an adapter, by the real command line."""

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdptrain.features.quantized_base.linear import dequantize, quantize
from tests.e2e import command
from tests.e2e.command import TINY_RUN
from tests.tensors import load_files

TRAINED = "LoRA of rank 4, alpha 32, on 14 weights: 8,192 of 99,200 parameters are trained"
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it


def test_an_adapter_is_trained_exported_and_loaded_by_peft(checkpoint: Path, tmp_path: Path) -> None:
    whole = tmp_path / "run"
    command.train(checkpoint, tmp_path, *TINY_RUN, "--lora-rank", "4", "--kl-loss-coef", "0.1", num_ranks=2)
    assert TRAINED in (tmp_path / "err").read_text()
    assert "for merged weights: fsdptrain export RUN --lora-export merged" in (tmp_path / "err").read_text()
    step = str(whole / "checkpoints" / "step_00000002")
    exported = ["export", "--checkpoint", step, "--output", str(tmp_path / "merged"), "--lora-export", "merged"]
    assert command.run(exported, tmp_path / "4").code == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = torch.arange(5, 45)[None]
    with torch.no_grad():
        before = start(tokens).logits
        adapted = peft.PeftModel.from_pretrained(start, whole / "hf")(tokens).logits
        assert torch.allclose(merged(tokens).logits, adapted, rtol=0, atol=1e-5)
        assert (adapted - before).abs().max() > 1e-3
    config = json.loads((whole / "hf" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == checkpoint.name  # no path of this machine


def test_an_adapter_on_weights_in_4_bits_is_trained_resumed_and_merged_into_the_dequantized_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = [*TINY_RUN, "--lora-rank", "4", "--load-in-4bit", "--kl-loss-coef", "0.1", "--lora-export", "both"]
    argv += ["--gradient-checkpointing"]
    for rollouts in ("1", "2"):
        command.train(checkpoint, tmp_path, *argv, "--num-rollout", rollouts)
    said = (tmp_path / "err").read_text()
    assert "frozen weights of 14 linear layers in 4 bits: 73,728 weights" in said
    assert TRAINED in said
    merged, base = load_files(run / "hf"), load_files(checkpoint)
    factors = load_files(run / "hf" / "adapter")
    name = "model.layers.0.mlp.up_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    weight = dequantize(*quantize(base[f"{name}.weight"]), torch.float32)
    assert b.abs().max() > 0
    assert torch.allclose(merged[f"{name}.weight"], weight + 32 / 4 * (b @ a), rtol=0, atol=1e-6)
