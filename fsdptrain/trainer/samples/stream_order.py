"""Redistribute the samples of several rounds of generation over the ranks."""

from collections.abc import Sequence

import torch.distributed as dist

from fsdptrain.data.packing.exchange import exchange_samples
from fsdptrain.data.packing.sample_index import gather_index
from fsdptrain.trainer.samples.selection import GroupResult, share
from fsdptrain.types import Sample


def in_stream_order(samples: Sequence[Sample], groups: Sequence[GroupResult]) -> list[Sample]:
    """Redistribute the samples so that, in rank order, they follow the order of `groups`. Collective.

    `samples` are those of this rank, in the order of `groups`. Whole groups stay together, and samples are copied bit
    for bit. After several rounds each rank holds a part of every round, an order that depends on the number of ranks.
    Without redistribution, the optimizer steps would depend on it too.
    """
    index = gather_index(samples)
    next_of = {owner: index.owners.index(owner) for owner in set(index.owners)}
    numbered: list[range] = []
    for group in groups:
        first = next_of[group.owner]
        next_of[group.owner] += group.num_samples
        numbered.append(range(first, first + group.num_samples))
    world_size = dist.get_world_size()
    parts = [numbered[share(len(numbered), rank, world_size)] for rank in range(world_size)]
    return exchange_samples(samples, [[i for members in part for i in members] for part in parts], index=index)
