"""A pack dealt over the ranks of a context-parallel group, in zigzags; and what was said of its tokens, together again.

Each sequence is padded to a multiple of 2 R tokens, and with sequence parallel so that each rank's part divides into
runs. Every rank computes the logprobs of its own tokens, and the loss of the whole pack from those of all: of its
gradient it takes its own part, so that sums over ranks are right.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.megatron.groups import Groups
from fsdptrain.megatron.zigzag import gather_own, own_tokens
from fsdptrain.types import PackedBatch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True)
class Dealt:
    """Which tokens of a pack this rank has."""

    group: dist.ProcessGroup
    seqlens: tuple[int, ...]  # with padding
    source: Tensor  # [T' / R] i64: the token of the pack at each place of this rank, 0 where there is none
    scored: Tensor  # [T' / R] bool: has a loss
    places: Tensor  # [T] i64: of each token of the pack among the T' of all ranks

    @property
    def own_positions(self) -> Tensor:
        """Places, on this rank, of tokens with a loss; of one without where there is none, so that no kernel gets
        nothing. [M] i64"""
        return self.scored.nonzero()[:, 0] if self.scored.any() else self.source.new_zeros(1)

    def inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Arguments of GPTModel."""
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
        """[M] at `own_positions` -> [T] of all ranks, 0 where there is no loss. Collective."""
        own = self.own_positions
        kept = values * self.scored[own]
        rows = values.new_zeros(len(self.source)).index_copy(0, own, kept)
        return gather_own(rows, self.seqlens, self.group).index_select(0, self.places)


def deal(batch: PackedBatch, config: "TransformerConfig") -> Dealt | None:
    """Over the context-parallel ranks of this process; None where each rank has a pack as it is."""
    if config.context_parallel_size == 1:
        return None
    group = Groups.present().context
    multiple = 2 * group.size() * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    seqlens = tuple(-(-length // multiple) * multiple for length in batch.seqlens)
    starts = torch.tensor((0, *seqlens)).cumsum(0)[:-1]
    places = torch.cat([start + torch.arange(n) for start, n in zip(starts.tolist(), batch.seqlens, strict=True)])
    device = batch.input_ids.device
    tokens = torch.full((sum(seqlens),), -1)
    tokens[places] = torch.arange(batch.num_tokens)
    own = tokens[own_tokens(seqlens, group)].to(device)
    source = own.clamp(min=0)
    return Dealt(group, seqlens, source, batch.loss_mask[source] & (own >= 0), places.to(device))
