"""What was scored in the first epoch of a rollout, for the packs of the later ones.

Old logprobs are those of the policy before its first update, so they are scored once, in the packs of the first epoch.
Later epochs pack the same samples otherwise, and on other ranks: the numbers of a sample follow it there, bit by bit.
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

CARRIED = ("advantages", "old_logprobs", "ref_logprobs")  # [T] each: what scoring adds to a pack, or changes in it


def carry_scores(
    scored: Sequence[StepBatches], later: Sequence[StepBatches], *, with_routes: bool = False
) -> list[StepBatches]:
    """`later`, with what `scored`, the steps of the first epoch, hold of the same samples. Collective.

    with_routes: scoring has recorded routes; those of an engine are in all epochs already.
    """
    if not later:
        return []
    names = [name for name in CARRIED if getattr(scored[0].packs[0], name) is not None]  # the same on every rank
    shape = _route_shape(scored) if with_routes else (0, 0)
    num_rows = len(names) + math.prod(shape)
    rows = {
        i: row
        for step in scored
        for batch, packed in _own_packs(step)
        for i, row in _rows(batch, packed, names, with_routes)
    }
    holders = {i: rank for step in scored for rank, packs in enumerate(step.members) for pack in packs for i in pack}
    wanted = [
        [i for step in later for pack in step.members[rank] for i in pack] for rank in range(dist.get_world_size())
    ]
    widths = [length for step in later for batch, packed in _own_packs(step) if packed for length in batch.seqlens]
    arrived = iter(exchange_rows(rows, wanted, holders=holders, shapes=[(num_rows, width) for width in widths]))

    def filled(batch: PackedBatch, packed: Sequence[int]) -> PackedBatch:
        nothing = torch.zeros(num_rows, batch.num_tokens)  # the pack of a rank without work
        values = torch.cat([next(arrived) for _ in packed], dim=1) if packed else nothing
        found = dict(zip(names, values, strict=False))
        if with_routes and packed:
            found["routes"] = values[len(names) :].T.to(torch.int16).unflatten(1, shape)
        return replace(batch, **found)

    return [replace(step, packs=[filled(*pair) for pair in _own_packs(step)]) for step in later]


def _own_packs(step: StepBatches) -> Iterator[tuple[PackedBatch, Sequence[int]]]:
    """The packs of this rank, each with the numbers of its samples; a pack without work has none."""
    return zip(step.packs, step.members[dist.get_rank()], strict=True)


def _rows(
    batch: PackedBatch, packed: Sequence[int], names: Sequence[str], with_routes: bool
) -> Iterator[tuple[int, Tensor]]:
    """(number, [rows, L]) of each sample: the names, then layers x k of the routes, which float32 holds exactly."""
    if packed:
        columns = torch.stack([getattr(batch, name) for name in names])
        if with_routes and batch.routes is not None:
            columns = torch.cat([columns, batch.routes.flatten(1).T.float()])
        yield from zip(packed, columns.split(batch.seqlens, dim=1), strict=True)


def _route_shape(scored: Sequence[StepBatches]) -> tuple[int, int]:
    """(layers, k)"""
    routes = scored[0].packs[0].routes
    assert routes is not None, "scoring records routes for every pack"
    return routes.shape[1], routes.shape[2]
