"""Which conversions of a checkpoint need whole tensors."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from fsdptrain.model.loading.files import weight_files
from fsdptrain.model.loading.shard_reader import _commutes, needs_whole_tensors
from tests import zoo


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
