"""The ranks as a grid: replicas of a sharded model."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdptrain import platform
from fsdptrain.errors import ConfigError

REPLICATE, SHARD = "replicate", "shard"


def build_mesh(replicate_size: int) -> DeviceMesh:
    """All ranks as [shard], or as [replicate, shard] (HSDP) where there is more than one replica; collective.

    Ranks of one shard group are neighbours, so that with one replica per node the gathers stay within the node.
    """
    world_size = dist.get_world_size()
    if world_size % replicate_size:
        raise ConfigError(
            f"--fsdp-replicate-size {replicate_size} does not divide the {world_size} processes; "
            "processes = replicas x shards"
        )
    if replicate_size == 1:
        return init_device_mesh(platform.device_type(), (world_size,), mesh_dim_names=(SHARD,))
    shape = (replicate_size, world_size // replicate_size)
    return init_device_mesh(platform.device_type(), shape, mesh_dim_names=(REPLICATE, SHARD))


def shard_size(mesh: DeviceMesh) -> int:
    """Ranks over which one replica is sharded."""
    return mesh.shape[-1]
