"""Gather the tokens of all ranks around a module that is not sharded, and slice its output, with exact gradients.

Context parallelism cuts each sequence into 2 R chunks, and rank r holds chunks r and 2 R - 1 - r, which balances the
work of causal attention. The functions must be used in pairs (`sums`: the backward of the gather sums over ranks):

    context parallelism    gather_zigzag, slice_zigzag. Weights in between get the gradient of this rank's tokens.
    sequence parallelism   megatron-core's gather_from_sequence_parallel_region(tensor_parallel_output_grad=False) and
                           scatter_to_sequence_parallel_region. Weights get the full gradient on each rank.

Mixing the pairs gives wrong gradients without an error (tests/megatron/test_zigzag.py measures it).

`shard_tokens` shards a pack. Each sequence is padded to a multiple of 2 R tokens; with sequence parallelism also so
that each rank's part divides evenly. Every rank computes the logprobs of its own tokens, gathers those of all tokens,
and computes the loss of the whole pack. In the backward it takes its own part of the gradient, so that sums over ranks
are correct.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.megatron.groups import process_groups
from fsdptrain.types import PackedBatch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


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


@dataclass(frozen=True)
class TokenShards:
    """The tokens of a pack that this rank holds."""

    group: dist.ProcessGroup
    seqlens: tuple[int, ...]  # padded
    source: Tensor  # [T' / R] i64: index in the pack of each token on this rank, 0 for padding
    scored: Tensor  # [T' / R] bool: has a loss
    places: Tensor  # [T] i64: index of each token of the pack among the T' padded tokens of all ranks

    @property
    def own_positions(self) -> Tensor:
        """Indices on this rank of the tokens with a loss. [M] i64

        If there are none, the index of one token without a loss, because kernels need at least one token.
        """
        return self.scored.nonzero()[:, 0] if self.scored.any() else self.source.new_zeros(1)

    def inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of GPTModel."""
        from megatron.core.packed_seq_params import PackedSeqParams

        lengths = torch.tensor((0, *self.seqlens))
        cu_seqlens = lengths.cumsum(0).int().to(self.source.device)
        longest = max(self.seqlens)
        boundaries = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
        return {
            "input_ids": batch.input_ids[self.source][None],
            "position_ids": batch.position_ids[self.source][None],
            "attention_mask": None,
            "packed_seq_params": boundaries,
        }

    def to_pack(self, values: Tensor) -> Tensor:
        """Gather values [M] at `own_positions` into [T] over all ranks, 0 for tokens without a loss. Collective."""
        own = self.own_positions
        kept = values * self.scored[own]
        rows = values.new_zeros(len(self.source)).index_copy(0, own, kept)
        return gather_zigzag(rows, self.seqlens, self.group, sums=False).index_select(0, self.places)


def shard_tokens(batch: PackedBatch, config: "TransformerConfig") -> TokenShards | None:
    """Shard `batch` over the context-parallel ranks. None without context parallelism."""
    if config.context_parallel_size == 1:
        return None
    group = process_groups().cp
    multiple = 2 * group.size() * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    seqlens = tuple(-(-length // multiple) * multiple for length in batch.seqlens)
    starts = torch.tensor((0, *seqlens)).cumsum(0)[:-1]
    places = torch.cat([start + torch.arange(n) for start, n in zip(starts.tolist(), batch.seqlens, strict=True)])
    device = batch.input_ids.device
    tokens = torch.full((sum(seqlens),), -1)
    tokens[places] = torch.arange(batch.num_tokens)
    own = tokens[own_tokens(seqlens, group)].to(device)
    source = own.clamp(min=0)
    return TokenShards(group, seqlens, source, batch.loss_mask[source] & (own >= 0), places.to(device))
