"""Gather and slice tokens over ranks, with the gradients of a single rank that has all tokens.

Context parallelism splits each sequence into 2 R chunks, and rank r holds chunks r and 2 R - 1 - r, which balances the
work of causal attention. A module between a gather and a slice computes all tokens on each rank. The gradients that it
receives depend on the backward of the slice, so the functions must be used in pairs:

    pair A   gather_zigzag, slice_zigzag: the backward of the slice is the gradient of this rank's tokens, zero
             elsewhere; the backward of the gather sums over ranks. Weights in between get the gradient of this
             rank's tokens: sum it over the ranks, as for other weights. For context parallelism.
    pair B   gather_copies, slice_copies: the backward of the slice all-gathers the gradient of all tokens; the
             backward of the gather takes this rank's part. Weights in between get the full gradient on each rank:
             do not sum it. For sequence parallelism, where the ranks of a tensor group hold copies of such weights.

Mixing the pairs gives wrong gradients without an error: a gather that takes this rank's part, with a slice that returns
zeros elsewhere, drops the effect of this rank's tokens on those of other ranks (tests/megatron/test_zigzag.py measures
it).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.errors import ConfigError

# names in torch >= 2.13, which warns about the older names
_all_gather = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
_reduce_scatter = vars(dist).get("reduce_scatter_single") or dist.reduce_scatter_tensor


def gather_zigzag(x: Tensor, seqlens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gather the tokens of all ranks in sequence order: [T / R, ...] -> [T, ...]. Collective; pair A."""
    return _gather(x, zigzag_order(seqlens, group.size()).to(x.device), group, sums=True)


def slice_zigzag(x: Tensor, seqlens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Select this rank's tokens: [T, ...] -> [T / R, ...]. Pair A."""
    return x.index_select(0, own_tokens(seqlens, group).to(x.device))


def gather_copies(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the tokens of all ranks in rank order: [T / R, ...] -> [T, ...]. Collective; pair B."""
    return _gather(x, None, group, sums=False)


def slice_copies(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Select this rank's contiguous tokens: [T, ...] -> [T / R, ...]. The backward is collective. Pair B."""
    found = _SliceCopies.apply(x, group)
    assert isinstance(found, Tensor)
    return found


def own_tokens(seqlens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the indices of this rank's tokens among all tokens: [T / R] i64."""
    return zigzag_order(seqlens, group.size()).chunk(group.size())[dist.get_rank(group)]


def zigzag_order(seqlens: Sequence[int], num_ranks: int) -> Tensor:
    """Return the token indices, in sequence order, that ranks 0, 1, ... hold, concatenated: [T] i64.

    Each rank holds its part of the first sequence, then of the second, and so on. Raises ConfigError if 2 R does not
    divide a length.
    """
    parts: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    start = 0
    for length in seqlens:
        if length % (2 * num_ranks):
            raise ConfigError(
                f"--megatron-context-parallel {num_ranks}: a sequence of {length} tokens is not a multiple of "
                f"{2 * num_ranks}: pad it"
            )
        chunks = torch.arange(start, start + length).chunk(2 * num_ranks)
        for rank, part in enumerate(parts):
            part += [chunks[rank], chunks[-1 - rank]]
        start += length
    return torch.cat([piece for part in parts for piece in part])


def gather_own(x: Tensor, seqlens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gather as `gather_zigzag`, for a loss that every rank computes on all tokens.

    In the backward, every rank takes its own part of the gradient.
    """
    return _gather(x, zigzag_order(seqlens, group.size()).to(x.device), group, sums=False)


def _gather(x: Tensor, order: Tensor | None, group: dist.ProcessGroup, *, sums: bool) -> Tensor:
    found = _Gather.apply(x, order, group, sums)
    assert isinstance(found, Tensor)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor | None, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.order, ctx.group, ctx.sums = order, group, sums
        found = _all_ranks(x, group)
        if order is None:
            return found
        return torch.empty_like(found).index_copy_(0, order, found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        dealt = (grad if ctx.order is None else grad.index_select(0, ctx.order)).contiguous()
        if not ctx.sums:
            return _own_run(dealt, ctx.group), None, None, None
        own = torch.empty_like(_own_run(dealt, ctx.group))
        _reduce_scatter(own, dealt, group=ctx.group)
        return own, None, None, None


class _SliceCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_run(x, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_ranks(grads[0], ctx.group), None


def _all_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    _all_gather(found, x.contiguous(), group=group)
    return found


def _own_run(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.tensor_split(group.size())[dist.get_rank(group)]
