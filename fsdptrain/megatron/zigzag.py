"""Tokens dealt over ranks, and together again, with gradients that are those of one rank with all tokens.

Context parallel deals each sequence in 2 R chunks, of which rank r holds chunks r and 2 R - 1 - r: in causal attention
all ranks then have as much to do. A module between gather and slice computes all tokens on each rank; whose gradients
it then sees depends on what the slice hands back, so the two functions of a pair belong together:

    pair A   gather_zigzag, slice_zigzag: the slice hands back the gradient of the own tokens, zero elsewhere; the
             gather sums over ranks. Weights between them get the gradient of the own tokens: sum it over the ranks, as
             that of weights elsewhere. For context parallel.
    pair B   gather_copies, slice_copies: the slice hands back the gradient of all tokens, gathered; the gather takes
             its own part. Weights between them get the whole gradient on each rank: do not sum it. For sequence
             parallel, where the ranks of a tensor group hold copies of such weights.

A gather that takes its own part behind a slice that hands back zeros elsewhere drops what the own tokens do to those of
other ranks: it runs, and its gradients are wrong (tests/megatron/test_zigzag.py measures it).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.errors import ConfigError

# torch >= 2.13 calls them so, and warns of the names that it had before
_all_gather = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
_reduce_scatter = vars(dist).get("reduce_scatter_single") or dist.reduce_scatter_tensor


def gather_zigzag(x: Tensor, seqlens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The tokens of all ranks in the order of the sequences: [T / R, ...] -> [T, ...]. Collective; of pair A."""
    return _gather(x, zigzag_order(seqlens, group.size()).to(x.device), group, sums=True)


def slice_zigzag(x: Tensor, seqlens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens: [T, ...] -> [T / R, ...]. Of pair A."""
    return x.index_select(0, own_tokens(seqlens, group).to(x.device))


def gather_copies(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tokens of all ranks, one run after the other: [T / R, ...] -> [T, ...]. Collective; of pair B."""
    return _gather(x, None, group, sums=False)


def slice_copies(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's run of tokens: [T, ...] -> [T / R, ...]. Its backward is collective. Of pair B."""
    found = _SliceCopies.apply(x, group)
    assert isinstance(found, Tensor)
    return found


def own_tokens(seqlens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Places, among all tokens, of those that this rank holds: [T / R] i64."""
    return zigzag_order(seqlens, group.size()).chunk(group.size())[dist.get_rank(group)]


def zigzag_order(seqlens: Sequence[int], num_ranks: int) -> Tensor:
    """Places, in the order of the sequences, of the tokens of rank 0, then of rank 1 and so on: [T] i64.

    A rank holds its part of the first sequence, then of the second and so on. ConfigError for a length that 2 R does
    not divide.
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
    """As `gather_zigzag`, for a loss that each rank computes whole: of its gradient every rank takes its own part."""
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
