"""Weights move between the files and megatron-core without a bit changed, however the model is split."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdptrain.testing import spawn
from tests.megatron import cases

# family, how it is split, number of ranks
LAYOUTS = [
    ("qwen3", {}, 1),
    ("llama", {"tensor_parallel": 2}, 2),
    ("qwen3", {"tensor_parallel": 2}, 2),
    ("qwen3", {"pipeline_parallel": 2}, 2),
    ("qwen3_moe", {}, 1),
    ("qwen3_moe", {"expert_parallel": 2}, 2),
    ("qwen3_moe", {"pipeline_parallel": 2}, 2),
]


def round_trip(folder: Path, layout: dict) -> tuple[dict, dict, dict, int]:
    from fsdptrain.backends.megatron.weights import by_module

    built = cases.build(folder, **layout)
    hub = {name: tensor.clone() for name, tensor in built.weights.stream()}
    modules = {name: tensor.clone() for name, tensor in by_module(built.weights.stream(), built.stock)}
    return hub, modules, dict(built.stock.state_dict()), sum(p.numel() for p in built.model.parameters())


@pytest.mark.parametrize(("family", "layout", "num_ranks"), LAYOUTS)
def test_what_was_loaded_comes_out_bitwise(tmp_path, family, layout, num_ranks) -> None:
    folder = cases.save(family, tmp_path / "model", tie_word_embeddings=layout.get("pipeline_parallel", 1) > 1)
    files = load_file(folder / "model.safetensors")
    for hub, modules, state, _ in spawn(num_ranks, round_trip, folder, layout):
        assert hub.keys() == files.keys()
        assert all(torch.equal(hub[name], files[name]) for name in files)
        assert all(torch.equal(tensor, state[name]) for name, tensor in modules.items())
        assert state.keys() - modules.keys() <= {"lm_head.weight"}
