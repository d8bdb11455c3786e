"""The ranks as a grid: replicas of a sharded model, whose layers and experts may be split over ranks besides.

    dense    [replicate, shard, tensor]            all parameters but those of split experts
    experts  [replicate, expert_shard, expert]     the same ranks, seen otherwise
    tokens   [replicate, ., context, tensor]       neighbours within the shard axis share the tokens of a pack

`tensor` is innermost: its ranks, which wait for each other in every layer, are neighbours; those of `context`, which do
in every attention, come next. Both compute the same loss of the same packs. Parameters are sharded over the context
too: to FSDP its ranks are data ranks, whose gradients are of other tokens. An axis of size 1 is left out where nothing
asks for it.
"""

import logging
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdptrain import platform
from fsdptrain.errors import ConfigError

REPLICATE, SHARD, CONTEXT, TENSOR = "replicate", "shard", "context", "tensor"
EXPERT_SHARD, EXPERT = "expert_shard", "expert"


@dataclass(frozen=True)
class Meshes:
    """`dense` and `expert_shards` are what FSDP shards over, the others are split over before."""

    dense: DeviceMesh  # [shard] or [replicate, shard]
    tensor: DeviceMesh | None = None  # [tensor]; of size 1 where only experts are split
    experts: DeviceMesh | None = None  # [expert]
    expert_shards: DeviceMesh | None = None  # [expert_shard] or [replicate, expert_shard]
    context: DeviceMesh | None = None  # [context]: tokens are dealt over it


def build_meshes(*, replicate_size: int, tensor_size: int, expert_size: int, context_size: int = 1) -> Meshes:
    """Collective. Sizes are checked by `config.check_world_size`."""
    rest = dist.get_world_size() // replicate_size
    context = None
    if context_size > 1:
        assert rest % (context_size * tensor_size) == 0
        shards = rest // (context_size * tensor_size)
        grid = _grid({REPLICATE: replicate_size, SHARD: shards, CONTEXT: context_size, TENSOR: tensor_size})
        context = grid[CONTEXT]
    if tensor_size == expert_size == 1:
        return Meshes(build_mesh(replicate_size), context=context)
    # what is on two axes is gathered and summed by one collective for each: torch would say so for every kind of tensor
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    assert rest % tensor_size == 0
    assert rest % expert_size == 0
    dense = _grid({REPLICATE: replicate_size, SHARD: rest // tensor_size, TENSOR: tensor_size})
    fsdp = (SHARD,) if replicate_size == 1 else (REPLICATE, SHARD)
    if expert_size == 1:
        return Meshes(dense[fsdp], dense[TENSOR], context=context)
    sparse = _grid({REPLICATE: replicate_size, EXPERT_SHARD: rest // expert_size, EXPERT: expert_size})
    expert_fsdp = (EXPERT_SHARD,) if replicate_size == 1 else (REPLICATE, EXPERT_SHARD)
    return Meshes(dense[fsdp], dense[TENSOR], sparse[EXPERT], sparse[expert_fsdp], context)


def _grid(sizes: dict[str, int]) -> DeviceMesh:
    if sizes[REPLICATE] == 1:
        del sizes[REPLICATE]
    return init_device_mesh(platform.device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))


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
