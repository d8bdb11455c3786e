"""Adapter arithmetic on sharded weights: initialization and merging.

A peft layer computes W x + s B A x with s = alpha / rank, so its merged weight is W + s B A. Each rank merges its
own part of W in float32.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdptrain.model.loading.materialize import local_part, moved, own_part

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
    product = _product(layer, weight.dim(), *(_whole(module.weight, device) for module in factors(layer)))
    local_part(total).add_(own_part(product.mul_(layer.scaling[NAME]), total))
    return total


def _product(layer: Any, num_dims: int, a: Tensor, b: Tensor) -> Tensor:
    """Return B A in the dim order of the weight. For fused experts A is [experts x rank, in], B [out, rank x experts].

    peft's own function rounds it to the dtype of the weight.
    """
    if num_dims == 2:
        return (b @ a).T if layer.fan_in_fan_out else b @ a
    a = a.reshape(layer.num_experts, -1, a.shape[-1])  # [E, r, in]
    b = b.reshape(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)  # [E, out, r]
    transposed = getattr(layer.get_base_layer(), "is_transposed", False)  # weights [E, in, out]; same check as in peft
    return (b @ a).mT if transposed else b @ a


def _whole(parameter: Tensor, device: torch.device) -> Tensor:
    found = moved(parameter, device, torch.float32)
    return found.full_tensor() if isinstance(found, DTensor) else found
