"""Gather the tokens of all ranks around a module that is not sharded, and slice its output, with exact gradients.

Context parallelism cuts each sequence into 2 R chunks, and rank r holds chunks r and 2 R - 1 - r, which balances the
work of causal attention. The functions must be used in pairs (`sums`: the backward of the gather sums over ranks):

    context parallelism    gather_zigzag, slice_zigzag. Weights in between get the gradient of this rank's tokens.
    sequence parallelism   megatron-core's gather_from_sequence_parallel_region(tensor_parallel_output_grad=False) and
                           scatter_to_sequence_parallel_region. Weights get the full gradient on each rank.

Mixing the pairs gives wrong gradients without an error (tests/megatron/test_zigzag.py measures it).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gather_zigzag(x: Tensor, seqlens: Sequence[int], group: dist.ProcessGroup, *, sums: bool = True) -> Tensor:
    """Gather the tokens of all ranks in sequence order: [T / R, ...] -> [T, ...]. Collective.

    sums: the backward sums over ranks. False: every rank computes the same loss, and takes its part of the gradient.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    found = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=sums, group=group)
    return found.index_select(0, zigzag_order(seqlens, group.size()).argsort().to(x.device))


def slice_zigzag(x: Tensor, seqlens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Select this rank's tokens: [T, ...] -> [T / R, ...]."""
    return x.index_select(0, own_tokens(seqlens, group).to(x.device))


def own_tokens(seqlens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the indices of this rank's tokens among all tokens: [T / R] i64."""
    return zigzag_order(seqlens, group.size()).chunk(group.size())[group.rank()]


def zigzag_order(seqlens: Sequence[int], num_ranks: int) -> Tensor:
    """Return the token indices, in sequence order, that ranks 0, 1, ... hold, concatenated: [T] i64.

    2 R divides each length.
    """
    tokens = torch.arange(sum(seqlens)).split(list(seqlens))
    chunks = [part.chunk(2 * num_ranks) for part in tokens]
    return torch.cat([c for r in range(num_ranks) for part in chunks for c in (part[r], part[-1 - r])])
