"""FSDP2 over a transformers model: one group for each layer of text or vision tower, one for all the rest.

Gradients are summed over ranks, not averaged: `loss_weights` already hold the global denominator (invariant 2).
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
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
from fsdptrain.fsdp.mesh import EXPERT, TENSOR, shard_size
from fsdptrain.model.structure import decoder_layers, repeated_layers


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    cpu_offload: bool,
    reshard_after_forward: bool,
    prefetch: bool,
    runs_tower: bool = False,
    expert_shards: DeviceMesh | None = None,
) -> None:
    """Shard `model` in place over the shard axis of `mesh`; parameters may be on meta, and split over other axes.

    Embedding, last norm and head are one group with the root: the head is then gathered where the logprobs are
    computed, and a tied weight has one owner. That group stays gathered between forward and backward.

    Args:
        compute_dtype: dtype of gathered parameters; sharded ones keep theirs (float32), and gradients are reduced in
            float32 (float64 for float64).
        cpu_offload: keep shards, gradients and therefore the optimizer's state in host memory.
        reshard_after_forward: free each layer after its forward and gather it again for its backward.
        prefetch: gather one layer ahead, forward and backward. Off: one layer at a time.
        runs_tower: every forward pass goes through the vision tower too.
        expert_shards: what experts that are split are sharded over, in groups of their own.
    """
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    options = {
        "mesh": mesh,
        "shard_placement_fn": expert_placement(shard_size(mesh)),
        "offload_policy": CPUOffloadPolicy(pin_memory=platform.has_accelerator()) if cpu_offload else OffloadPolicy(),
        # inputs of layers stay what the model made them: rotary tables in float32, where its authors meant that
        "mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False),
    }
    for experts in split_experts(model):
        assert expert_shards is not None
        [axis] = {p.device_mesh for p in experts.parameters(recurse=False) if isinstance(p, DTensor)}
        place = expert_placement(shard_size(expert_shards), parts=axis.size())
        own = {"mesh": expert_shards, "shard_placement_fn": place}
        fully_shard(experts, reshard_after_forward=reshard_after_forward, **(options | own))
    for layer in _layers_of_their_own(model):
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)  # the backward pass begins with this group
    for module in _sharded_modules(model):
        if dist.get_world_size() > 1:  # on one rank it is 1 anyway, and to set it costs a copy of all gradients
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, which a divide factor uses otherwise
    run = repeated_layers(model) if runs_tower else decoder_layers(model)
    inside = [module for layer in run for module in layer.modules()]  # a layer, then its experts
    _set_prefetch([module for module in (model, *inside) if isinstance(module, FSDPModule)], prefetch)


def largest_shard(parameter: nn.Parameter, num_shards: int, *, cut_dim: int = 0, parts: int = 1) -> int:
    """Numbers of `parameter` that the rank with most of it holds, where it was cut into `parts` along a dim before."""
    if not parameter.dim():
        return parameter.numel()
    placement = expert_placement(num_shards, parts=parts)(parameter)
    shape = list(parameter.shape)
    for dim, count in ((cut_dim, parts), (0 if placement is None else placement.dim, num_shards)):
        shape[dim] = math.ceil(shape[dim] / count)
    return math.prod(shape)


def split_experts(model: nn.Module) -> list[nn.Module]:
    """Modules whose experts are split over the expert axis, before they are sharded."""
    return [module for module in model.modules() if any(_is_split(p, EXPERT) for p in module.parameters(recurse=False))]


def _is_split(parameter: nn.Parameter, axis: str) -> bool:
    return isinstance(parameter, DTensor) and axis in (parameter.device_mesh.mesh_dim_names or ())


def expert_placement(num_shards: int, *, parts: int = 1) -> Callable[[nn.Parameter], Shard | None]:
    """Fused experts [E, ., .] are sharded over E, or over their last dim where some ranks would own no expert.

    Not over dim 1: there transformers concatenates gate and up, and its reader would interleave their slices.
    Of experts in `parts` each part is sharded, and over E only where that is even; their biases [E, .] alike.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter.dim() != 3 and (parts == 1 or parameter.dim() != 2):
            return None
        rows = parameter.shape[0] // parts
        if rows % num_shards == 0 or (parts == 1 and _every_rank_owns_some(rows, num_shards)):
            return None
        if _is_split(parameter, TENSOR):
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


def _every_rank_owns_some(rows: int, num_shards: int) -> bool:
    """Whether chunks of ceil(rows / num_shards), dealt from rank 0 on, reach the last one: 6 rows on 4 do not."""
    return math.ceil(rows / num_shards) * (num_shards - 1) < rows


def _layers_of_their_own(model: PreTrainedModel) -> list[nn.Module]:
    """Repeated layers that share no parameter with another: what is shared has one owner, the root (zamba)."""
    layers = repeated_layers(model)
    num_owners = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    return [layer for layer in layers if all(num_owners[parameter] == 1 for parameter in layer.parameters())]


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _set_prefetch(groups: Sequence[FSDPModule], prefetch: bool) -> None:
    """`groups` in the order of the forward pass.

    By itself FSDP2 gathers the next group when the forward comes to it, which overlaps only while the host runs ahead,
    and gathers one group ahead in the backward pass. So forward is made explicit, and backward is left as it is; or
    it is switched off by a list that holds the group itself, which is gathered already.
    """
    if prefetch:
        for group, following in pairwise(groups):
            group.set_modules_to_forward_prefetch([following])
    else:
        for group in groups:
            group.set_modules_to_backward_prefetch([group])
