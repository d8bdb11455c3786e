"""Which conversions of a checkpoint need whole tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from fsdptrain.model.loading.files import weight_files
from fsdptrain.model.loading.shard_reader import _commutes, needs_whole_tensors
from tests import zoo


@contextmanager
def mesh_of(num_ranks: int) -> Iterator[DeviceMesh]:
    """Of a fake group, with all ranks in this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()


def converts(operations: list[Any], mesh: DeviceMesh, *, dim: int) -> bool:
    """Whether `operations` may read the slices of a parameter that is sharded along `dim`."""
    parameter = DTensor.from_local(torch.empty(4, 4, 4), mesh, [Shard(dim)], run_check=False)
    return _commutes(WeightConverter("a", "b", operations=operations), parameter)


def test_only_a_conversion_along_the_sharded_axis_needs_whole_tensors() -> None:
    gate_and_up = [MergeModulelist(0), Concatenate(1)]
    with mesh_of(2) as mesh:
        assert [converts(gate_and_up, mesh, dim=dim) for dim in (0, 1)] == [True, False]
        assert [converts([Concatenate(0)], mesh, dim=dim) for dim in (0, 1)] == [False, True]
        assert not converts([MergeModulelist(1)], mesh, dim=0)
        assert not converts([Concatenate(1), MergeModulelist(1)], mesh, dim=0)
    with mesh_of(1) as mesh:  # which holds whole tensors
        assert converts(gate_and_up, mesh, dim=1)


def test_files_without_the_prefix_of_the_model_need_whole_tensors_too(tmp_path: Path) -> None:
    zoo.build("mixtral").model.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = zoo.build("mixtral")
        experts = model.model.layers[0].mlp.experts
        part = torch.empty_like(experts.gate_up_proj.chunk(2, dim=1)[0])
    with mesh_of(2) as mesh:
        experts.gate_up_proj = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(1)], run_check=False))
        assert "needs it whole" in needs_whole_tensors(model, weight_files(tmp_path))
