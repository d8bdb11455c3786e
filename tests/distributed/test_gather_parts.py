"""Gathering a tensor that several axes of a mesh shard: the owner receives all of it."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdptrain.fsdp.gather import gather_on
from fsdptrain.testing import spawn

PLACEMENTS = {
    "rows, cut again": (_StridedShard(0, split_factor=2), Shard(0)),
    "rows and columns": (Shard(0), Shard(1)),
    "columns and rows": (Shard(2), Shard(0)),
    "a copy for each of the first axis": (Replicate(), Shard(0)),
    "a copy for each of the second axis": (Shard(0), Replicate()),
    "copies": (Replicate(), Replicate()),
}
SHAPE = (8, 4, 6)


def gathered() -> dict[str, list[torch.Tensor | None]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    whole = torch.arange(8 * 4 * 6, dtype=torch.float32).reshape(SHAPE)
    tensors = {name: distribute_tensor(whole, mesh, placements) for name, placements in PLACEMENTS.items()}
    tensors["on one axis"] = distribute_tensor(whole, mesh["shard"], [Shard(0)])
    return {
        name: [gather_on(owner, tensor, torch.float64) for owner in range(dist.get_world_size())]
        for name, tensor in tensors.items()
    }


def test_only_the_owner_gets_the_whole_of_it():
    whole = torch.arange(8 * 4 * 6, dtype=torch.float64).reshape(SHAPE)
    for rank, found in enumerate(spawn(4, gathered)):
        for name, by_owner in found.items():
            for owner, tensor in enumerate(by_owner):
                assert (tensor is None) == (owner != rank), name
                assert tensor is None or torch.equal(tensor, whole), name
