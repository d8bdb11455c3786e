"""Copy the logprobs and advantages of the first epoch of a rollout to the packs of its later epochs.

Old logprobs are those of the policy before its first update, so they are computed once, in the packs of the first
epoch. Later epochs pack the same samples differently, on other ranks. The values are copied bit for bit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.data.packing.exchange import exchange_rows
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.types import PackedBatch

CARRIED = ("advantages", "old_logprobs", "ref_logprobs")  # [T] each: fields of a pack that scoring adds or changes


def carry_scores(scored: Sequence[StepBatches], later: Sequence[StepBatches]) -> list[StepBatches]:
    """Fill the packs of `later` with the values that `scored` has for the same samples. Collective.

    scored: the steps of the first epoch. Values of `PackedBatch.extras` must be exact in float32.
    """
    if not later:
        return []
    first = scored[0].packs[0]
    names = [name for name in (*CARRIED, *first.extras) if _field(first, name) is not None]
    fields = {name: _field(first, name) for name in names}  # the same on every rank
    num_rows = sum(math.prod(field.shape[1:]) for field in fields.values())
    rows = {i: row for step in scored for batch, packed in _own_packs(step) for i, row in _rows(batch, packed, names)}
    holders = {i: rank for step in scored for rank, packs in enumerate(step.members) for pack in packs for i in pack}
    wanted = [
        [i for step in later for pack in step.members[rank] for i in pack] for rank in range(dist.get_world_size())
    ]
    widths = [length for step in later for batch, packed in _own_packs(step) if packed for length in batch.seqlens]
    arrived = iter(exchange_rows(rows, wanted, holders=holders, shapes=[(num_rows, width) for width in widths]))

    def filled(batch: PackedBatch, packed: Sequence[int]) -> PackedBatch:
        empty = torch.zeros(num_rows, batch.num_tokens)  # for the empty pack of a rank without samples
        values = torch.cat([next(arrived) for _ in packed], dim=1) if packed else empty
        parts = values.split([math.prod(field.shape[1:]) for field in fields.values()])
        found = {
            name: part.T.to(field.dtype).reshape(-1, *field.shape[1:])
            for (name, field), part in zip(fields.items(), parts, strict=True)
            if packed or field.dim() == 1
        }
        extras = {name: found.pop(name) for name in first.extras if name in found}
        return replace(batch, extras=extras, **found)

    return [replace(step, packs=[filled(*pair) for pair in _own_packs(step)]) for step in later]


def _field(batch: PackedBatch, name: str) -> Tensor:
    return batch.extras[name] if name in batch.extras else getattr(batch, name)


def _own_packs(step: StepBatches) -> Iterator[tuple[PackedBatch, Sequence[int]]]:
    """Iterate over the packs of this rank, each with the indices of its samples. An empty pack has no indices."""
    return zip(step.packs, step.members[dist.get_rank()], strict=True)


def _rows(batch: PackedBatch, packed: Sequence[int], names: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, [rows, L] f32) for each sample, with the fields stacked along the first dimension."""
    if packed:
        columns = torch.cat([_field(batch, name).reshape(batch.num_tokens, -1).T.float() for name in names])
        yield from zip(packed, columns.split(batch.seqlens, dim=1), strict=True)
