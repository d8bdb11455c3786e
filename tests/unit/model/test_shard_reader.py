"""`--against-checkpoint` reports names and shapes that loading would reject, and nothing for matching files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain.model.loading.compare import FileDifferences, compare_names
from fsdptrain.model.loading.files import weight_files
from tests import zoo


def saved(name: str, folder: Path) -> Path:
    zoo.build(name).save_pretrained(folder)
    return folder


def compare(folder: Path) -> FileDifferences:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    return compare_names(model, folder, weight_files(folder))


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_matching_files_have_no_differences(name: str, tmp_path: Path):
    assert not compare(saved(name, tmp_path))


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt2"])
def test_each_difference_is_named(name: str, tmp_path: Path):
    folder = saved(name, tmp_path)
    weights = load_file(folder / "model.safetensors")
    norm = next(key for key in sorted(weights) if "norm" in key or "ln_" in key)
    wrong = next(key for key in sorted(weights) if "attn" in key and weights[key].dim() == 2)
    del weights[norm]
    weights[wrong] = weights[wrong][:-1].clone()
    weights["stranger.weight"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    found = compare(folder)

    assert found.missing == [norm]
    assert found.unexpected == ["stranger.weight"]
    assert [words.split(" ")[0] for words in found.misfits] == [wrong]


def test_an_expert_of_another_shape_is_named(tmp_path: Path):
    folder = saved("mixtral", tmp_path)
    weights = load_file(folder / "model.safetensors")
    key = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    weights[key] = weights[key][:-1].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    [failure] = compare(folder).failed
    assert failure.startswith("model.layers.0.mlp.experts.gate_up_proj")
