"""Device meshes: replicas of a sharded model, with optional tensor, expert and context parallelism.

    dense    [replicate, shard, tensor]            all parameters except split experts
    experts  [replicate, expert_shard, expert]     another view of the same ranks
    tokens   [replicate, ., context, tensor]       neighbors on the shard axis share the tokens of a pack

`tensor` is innermost because its ranks wait for each other in every layer. `context` comes next: its ranks wait for
each other in every attention. Both compute the same loss of the same packs. Parameters are also sharded over the
context axis: FSDP treats its ranks as data ranks, with gradients of different tokens. An axis of size 1 is omitted
unless it is needed.
"""

import logging
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdptrain import platform

REPLICATE, SHARD, CONTEXT, TENSOR = "replicate", "shard", "context", "tensor"
EXPERT_SHARD, EXPERT = "expert_shard", "expert"


@dataclass(frozen=True)
class Meshes:
    """Meshes of a run. FSDP shards over `dense` and `expert_shards`; the other axes split parameters or tokens."""

    dense: DeviceMesh  # [shard] or [replicate, shard]
    tensor: DeviceMesh | None = None  # [tensor]; size 1 if only experts are split
    experts: DeviceMesh | None = None  # [expert]
    expert_shards: DeviceMesh | None = None  # [expert_shard] or [replicate, expert_shard]
    context: DeviceMesh | None = None  # [context]: tokens are split over it


def build_meshes(*, replicate_size: int, tensor_size: int, expert_size: int, context_size: int = 1) -> Meshes:
    """Build the meshes. Collective. `config.check_world_size` validates the sizes."""
    rest = dist.get_world_size() // replicate_size
    context = None
    if context_size > 1:
        assert rest % (context_size * tensor_size) == 0
        shards = rest // (context_size * tensor_size)
        grid = _grid({REPLICATE: replicate_size, SHARD: shards, CONTEXT: context_size, TENSOR: tensor_size})
        context = grid[CONTEXT]
    if tensor_size == expert_size == 1:
        return Meshes(build_mesh(replicate_size), context=context)
    # torch warns for each kind of tensor that two axes take two collectives
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
    """Build a mesh of all ranks: [shard], or [replicate, shard] (HSDP) for several replicas. Collective.

    Ranks of one shard group are neighbors, so with one replica per node the all-gathers stay within the node.
    """
    return _grid({REPLICATE: replicate_size, SHARD: dist.get_world_size() // replicate_size})
