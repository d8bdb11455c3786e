"""Adapter arithmetic on sharded weights: initialization and merging.

A peft layer computes W x + s B A x with s = alpha / rank, so its merged weight is W + s B A. Each rank merges its
own part of W in float32, with all of the small A and B.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdptrain.model.loading.materialize import local_part, moved

NAME = "default"  # adapter name in peft's modules; absent from files


def factors(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the modules that hold A and B of a peft layer."""
    return layer.lora_A[NAME], layer.lora_B[NAME]


def initial_a(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return the initial A of peft: uniform in +-1/sqrt(columns), float32 on the host."""
    bound = 1.0 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def merged(weight: Tensor, layer: Any, device: torch.device) -> Tensor:
    """Return `weight` merged with its adapter, with the same sharding, in float32 on `device`. Collective."""
    total = moved(weight, device, torch.float32, copy=True)
    left, right = _product(layer, weight.dim(), *(_whole(module.weight, device) for module in factors(layer)))
    dim, own = _own_part_of(total)
    if dim == weight.dim() - 1:
        right = right[..., own]
    elif dim == weight.dim() - 2:
        left = left[..., own, :]
    elif dim is not None:
        left, right = left[own], right[own]
    part = local_part(total)
    part.add_((left @ right).mul_(layer.scaling[NAME]))
    return total


def _product(layer: Any, num_dims: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (left, right) with product B A in the dim order of the weight.

    For fused experts peft stores A as [experts x rank, in] and B as [out, rank x experts].
    """
    if num_dims == 2:
        return (a.mT, b.mT) if layer.fan_in_fan_out else (b, a)
    a = a.reshape(layer.num_experts, -1, a.shape[-1])  # [E, r, in]
    b = b.reshape(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)  # [E, out, r]
    transposed = getattr(layer.get_base_layer(), "is_transposed", False)  # weights [E, in, out]; same check as in peft
    return (a.mT, b.mT) if transposed else (b, a)


def _own_part_of(tensor: Tensor) -> tuple[int | None, Tensor]:
    """Return the sharded dim of `tensor` (None: not sharded) and this rank's indices along it."""
    if isinstance(tensor, DTensor):
        for dim in (placement.dim for placement in tensor.placements if isinstance(placement, Shard)):
            every = torch.arange(tensor.shape[dim], device=tensor.device)
            along = [Shard(0) if isinstance(placement, Shard) else placement for placement in tensor.placements]
            return dim, distribute_tensor(every, tensor.device_mesh, along, src_data_rank=None).to_local()
    return None, torch.empty(0, dtype=torch.int64, device=tensor.device)


def _whole(parameter: Tensor, device: torch.device) -> Tensor:
    found = moved(parameter, device, torch.float32)
    return found.full_tensor() if isinstance(found, DTensor) else found
