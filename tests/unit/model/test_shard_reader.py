"""`--against-checkpoint` reports names and shapes that loading would reject, and nothing for matching files."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from fsdptrain.model.loading.compare import FileDifferences, compare_names
from fsdptrain.model.loading.files import weight_files
from fsdptrain.model.loading.shard_reader import _commutes, needs_whole_tensors
from tests import zoo
from tests.matrix import only


def saved(name: str, folder: Path) -> Path:
    zoo.build(name).save_pretrained(folder)
    return folder


def compare(folder: Path) -> FileDifferences:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    return compare_names(model, folder, weight_files(folder))


@pytest.mark.parametrize("name", only(["qwen3_next", "gpt_oss"], zoo.ARCHITECTURES))
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


def converts(operations: list[Any], *, num_ranks: int, dim: int) -> bool:
    """Whether `operations` may read the slices of a parameter that is sharded along `dim`."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    parameter = DTensor.from_local(torch.empty(4, 4, 4), mesh, [Shard(dim)], run_check=False)
    return _commutes(WeightConverter("a", "b", operations=operations), parameter)


def test_only_a_conversion_along_the_sharded_axis_needs_whole_tensors() -> None:
    """The fake group has two ranks in one process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        gate_and_up = [MergeModulelist(0), Concatenate(1)]
        assert [converts(gate_and_up, num_ranks=2, dim=dim) for dim in (0, 1)] == [True, False]
        assert [converts([Concatenate(0)], num_ranks=2, dim=dim) for dim in (0, 1)] == [False, True]
        assert not converts([MergeModulelist(1)], num_ranks=2, dim=0)
        assert not converts([Concatenate(1), MergeModulelist(1)], num_ranks=2, dim=0)
    finally:
        dist.destroy_process_group()


def test_one_rank_holds_whole_tensors() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert converts([MergeModulelist(0), Concatenate(1)], num_ranks=1, dim=1)
    finally:
        dist.destroy_process_group()


def test_files_without_the_prefix_of_the_model_need_whole_tensors_too(tmp_path: Path) -> None:
    zoo.build("mixtral").model.save_pretrained(tmp_path)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with torch.device("meta"):
            model = zoo.build("mixtral")
            experts = model.model.layers[0].mlp.experts
            part = torch.empty_like(experts.gate_up_proj.chunk(2, dim=1)[0])
        sharded = DTensor.from_local(part, init_device_mesh("cpu", (2,)), [Shard(1)], run_check=False)
        experts.gate_up_proj = torch.nn.Parameter(sharded)
        assert "needs it whole" in needs_whole_tensors(model, weight_files(tmp_path))
    finally:
        dist.destroy_process_group()
