"""Logprobs where the head is split over the vocabulary."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.types import UNTRUNCATED, Truncation


def vocab_parallel_logprobs(
    hidden: Tensor,  # [T, D], the same on every rank
    weight: DTensor,  # [V, D], sharded over V on one axis
    labels: Tensor,
    *,
    bias: DTensor | None = None,
    truncation: Truncation = UNTRUNCATED,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute `chunked_logprobs` without truncation for a head that is split over ranks. No logits are gathered.

    Collective over the axis of `weight`: each chunk sums over the ranks what one rank sums over columns. The result is
    bitwise equal on every rank.
    """
    assert weight.placements == (Shard(0),)
    assert not truncation, "which tokens are kept is not known to one rank"
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    local_bias, group = None if bias is None else bias.to_local(), weight.device_mesh.get_group()
    local_labels = labels - offset[0]  # negative or >= v if another rank has them
    return chunked_logprobs(hidden, weight.to_local(), local_labels, bias=local_bias, group=group, **options)
