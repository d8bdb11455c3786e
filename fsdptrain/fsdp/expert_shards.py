"""Shard the experts of a layer, fused in parameters [E, ., .], whole or split over the expert axis."""

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.mesh import EXPERT, TENSOR


def shard_split_experts(model: nn.Module, expert_shards: DeviceMesh, options: dict[str, Any]) -> None:
    """Shard the experts that are split over the expert axis, in groups of their own. options: of `fully_shard`."""
    split = [m for m in model.modules() if any(is_split(p, EXPERT) for p in m.parameters(recurse=False))]
    for experts in split:  # listed before sharding
        [axis] = {p.device_mesh for p in experts.parameters(recurse=False) if isinstance(p, DTensor)}
        place = expert_placement(expert_shards.shape[-1], parts=axis.size())
        fully_shard(experts, **(options | {"mesh": expert_shards, "shard_placement_fn": place}))


def is_split(parameter: nn.Parameter, *axes: str) -> bool:
    """Return whether `parameter` is split over one of the mesh dims `axes`."""
    return isinstance(parameter, DTensor) and not set(axes).isdisjoint(parameter.device_mesh.mesh_dim_names or ())


def expert_placement(num_shards: int, *, parts: int = 1) -> Callable[[nn.Parameter], Shard | None]:
    """Return a shard_placement_fn: fused experts [E, ., .] on dim 0, or on the last dim if some ranks would get none.

    Dim 1 is not used: transformers concatenates gate and up along it, and its reader would interleave their slices. If
    the experts are split into `parts`, each part is sharded, on dim 0 only if that is even; the same holds for their
    biases [E, .]. The function raises ConfigError if no placement works.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter.dim() != 3 and (parts == 1 or parameter.dim() != 2):
            return None
        rows = parameter.shape[0] // parts
        owned = math.ceil(rows / num_shards) * (num_shards - 1)  # by all ranks but the last: 6 rows on 4 ranks are all
        if rows % num_shards == 0 or (parts == 1 and owned < rows):
            return None
        if is_split(parameter, TENSOR):
            raise ConfigError(
                f"{parameter.shape[0]} experts, split by --tensor-parallel-size, cannot be sharded over {num_shards} "
                "processes: choose other sizes, or use --expert-parallel-size"
            )
        num_experts, last = parameter.shape[0], parameter.shape[-1]
        if last % num_shards:
            raise ConfigError(
                f"{num_experts} experts with {last} columns cannot be sharded over {num_shards} processes: set "
                f"--fsdp-replicate-size so that processes / replicas divides {num_experts} or {last}"
            )
        return Shard(parameter.dim() - 1)

    return place
