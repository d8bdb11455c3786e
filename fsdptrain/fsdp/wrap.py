"""Shard a transformers model with FSDP2: one group per layer of text or vision tower, one for the remaining modules.

Gradients are summed over ranks, not averaged: `loss_weights` already contain the global denominator (invariant 2).
"""

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.mesh import EXPERT, TENSOR
from fsdptrain.model.structure import decoder_layers, repeated_layers


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    cpu_offload: bool,
    reshard_after_forward: bool,
    runs_tower: bool = False,
    expert_shards: DeviceMesh | None = None,
) -> None:
    """Shard `model` in place over the shard axis of `mesh`. Parameters may be on meta and split over other axes.

    Embedding, last norm and head are in the root group: the head is then gathered where the logprobs are computed, and
    a tied weight belongs to one group. The root group stays gathered between forward and backward.

    Args:
        compute_dtype: dtype of gathered parameters. Sharded ones keep theirs (float32). Gradients are reduced in
            float32 (float64 for float64).
        cpu_offload: keep shards, gradients and therefore the optimizer state in host memory.
        reshard_after_forward: free each layer after its forward and gather it again for its backward.
        runs_tower: every forward pass also runs the vision tower.
        expert_shards: mesh over which split experts are sharded, in separate groups.
    """
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    options = {
        "mesh": mesh,
        "shard_placement_fn": expert_placement(mesh.shape[-1]),
        "offload_policy": CPUOffloadPolicy(pin_memory=platform.has_accelerator()) if cpu_offload else OffloadPolicy(),
        # keep layer inputs in the model's dtypes: some models compute rotary tables in float32 on purpose
        "mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False),
    }
    for experts in split_experts(model):
        assert expert_shards is not None
        [axis] = {p.device_mesh for p in experts.parameters(recurse=False) if isinstance(p, DTensor)}
        place = expert_placement(expert_shards.shape[-1], parts=axis.size())
        own = {"mesh": expert_shards, "shard_placement_fn": place}
        fully_shard(experts, reshard_after_forward=reshard_after_forward, **(options | own))
    for layer in _layers_of_their_own(model):
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)  # the backward pass starts with this group
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        if dist.get_world_size() > 1:  # already 1 on one rank, where setting it costs a copy of all gradients
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a divide factor uses PREMUL_SUM, which gloo lacks
    run = repeated_layers(model) if runs_tower else decoder_layers(model)
    inside = [module for layer in run for module in layer.modules()]  # a layer, then its experts
    groups = [module for module in (model, *inside) if isinstance(module, FSDPModule)]
    for group, following in pairwise(groups):  # else FSDP2 gathers the next one when the forward pass reaches it
        group.set_modules_to_forward_prefetch([following])


def split_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose experts are split over the expert axis. Call it before sharding."""
    return [module for module in model.modules() if any(is_split(p, EXPERT) for p in module.parameters(recurse=False))]


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


def _layers_of_their_own(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers that share no parameter with another layer. Shared ones belong to the root (zamba)."""
    layers = repeated_layers(model)
    num_owners = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    return [layer for layer in layers if all(num_owners[parameter] == 1 for parameter in layer.parameters())]
