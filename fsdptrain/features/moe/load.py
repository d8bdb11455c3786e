"""The load of experts in an optimizer step: of the tokens of sequences with a loss, prompts included, on all ranks."""

import torch
from torch import Tensor

from fsdptrain.types import NO_ROUTE, Metrics, PackedBatch


def load_metrics(counts: Tensor) -> Metrics:
    """Return moe/load_max (most loaded expert of any layer, 1: balanced) and moe/dead_experts (a fraction).

    counts: [layers, experts] choices of the whole step. Layers without experts have none.
    """
    counts = counts[counts.sum(1) > 0].double()
    if not len(counts):
        return {}
    load = counts * counts.shape[1] / counts.sum(1, keepdim=True)
    return {"moe/load_max": load.max().item(), "moe/dead_experts": (load == 0).double().mean().item()}


def count_choices(routes: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """Count how often the counted tokens choose each expert: [layers, E] i64.

    routes: [T, layers, k], with NO_ROUTE. counted: [T] bool.
    """
    layers = routes.shape[1]
    experts = routes.long() + num_experts * torch.arange(layers, device=routes.device)[:, None]
    chosen = (routes != NO_ROUTE) & counted[:, None, None]
    counts = torch.zeros(layers * num_experts, dtype=torch.int64, device=routes.device)
    counts.index_add_(0, experts.clamp(min=0).flatten(), chosen.flatten().long())
    return counts.view(layers, num_experts)


def trained_tokens(batch: PackedBatch) -> Tensor:
    """Return [T] bool: tokens of sequences with a loss. Excludes filler packs and samples without a loss."""
    masks = batch.loss_mask.split(batch.seqlens)
    return torch.cat([mask.any().expand_as(mask) for mask in masks])
