"""Shard a transformers model with FSDP2: one group per layer of text or vision tower, one for the remaining modules.

Gradients are summed over ranks, not averaged: `loss_weights` already contain the global denominator (invariant 2).
"""

from collections import Counter
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from fsdptrain import platform
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
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=platform.has_accelerator()) if cpu_offload else OffloadPolicy(),
        # keep layer inputs in the model's dtypes: some models compute rotary tables in float32 on purpose
        "mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False),
    }
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        from fsdptrain.fsdp.expert_shards import expert_placement, shard_split_experts

        options["shard_placement_fn"] = expert_placement(mesh.shape[-1])
        if expert_shards is not None:
            shard_split_experts(model, expert_shards, options | {"reshard_after_forward": reshard_after_forward})
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


def _layers_of_their_own(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers that share no parameter with another layer. Shared ones belong to the root (zamba)."""
    layers = repeated_layers(model)
    num_owners = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    return [layer for layer in layers if all(num_owners[parameter] == 1 for parameter in layer.parameters())]
