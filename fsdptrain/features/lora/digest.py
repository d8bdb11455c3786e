"""A hash of the frozen weights, which a checkpoint of an adapter belongs to."""

from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdptrain import platform
from fsdptrain.fsdp.shards import local_shard, model_tensors
from fsdptrain.model.structure import reshard


@torch.no_grad()
def content_digest(model: nn.Module) -> str:
    """Hash the weights. The result does not depend on the number of ranks. Collective.

    Sums the bits of each tensor as integers, which does not depend on the sharding. All tensors must be sharded over
    the last axis of one mesh.
    """
    reshard(model)
    tensors = model_tensors(model)
    sums = {name: _bit_sum(local_shard(tensor)).to(platform.local_device()) for name, tensor in tensors.items()}
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    if sharded:
        mesh = next(iter(sharded.values())).device_mesh
        total = torch.stack([sums[name] for name in sharded])
        dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
        sums |= dict(zip(sharded, total, strict=True))
    return sha256(repr([(name, int(value)) for name, value in sums.items()]).encode()).hexdigest()[:16]


def _bit_sum(tensor: Tensor) -> Tensor:
    """Sum the bits of `tensor` as integers: [] int64, may wrap around."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(bits).sum(dtype=torch.int64)
