"""Exchange of samples between ranks: each sample arrives once, bitwise, on the rank that the plan assigns."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptrain.data.packing.exchange import _without_tokens, exchange_samples
from fsdptrain.data.packing.sample_index import gather_index
from fsdptrain.types import Sample
from tests.properties.strategies import random_sample
from tests.testing import spawn

COUNTS = [5, 0, 11, 2]  # samples that ranks generated; one has none


def make_samples(rank: int, *, routes: bool = False) -> list[Sample]:
    rng = Random(rank)
    names = [f"task:{rank}ü{index}" for index in range(COUNTS[rank])]
    samples = [random_sample(rng, rng.choice([1, 2, rng.randrange(3, 60)]), name) for name in names]
    samples = [replace(s, token_weights=rng.choice([None, [rng.random() for _ in s.token_ids]])) for s in samples]
    if not routes:
        return samples
    return [replace(s, routes=torch.tensor(numbers(rng, len(s.token_ids)), dtype=torch.int16)) for s in samples]


def numbers(rng: Random, length: int) -> list:
    """Routes of `length` tokens in 3 layers, 2 experts each."""
    return [[[rng.randrange(-1, 300) for _ in range(2)] for _ in range(3)] for _ in range(length)]


def key(sample: Sample) -> str:
    routes = None if sample.routes is None else (sample.routes.dtype, sample.routes.tolist())
    return repr((sample, routes))  # tells -0.0 from 0.0, and every bit of a float


def exchange(shuffle_seed: int, routes: bool) -> tuple[Any, list[str]]:
    """Exchange samples by a random plan that is the same on all ranks; some samples are not sent."""
    mine = make_samples(dist.get_rank(), routes=routes)
    index = gather_index(mine)
    own = [i for i, owner in enumerate(index.owners) if owner == dist.get_rank()]
    assert [index.lengths[i] for i in own] == [len(sample.token_ids) for sample in mine]
    order = list(range(len(index.lengths)))
    Random(shuffle_seed).shuffle(order)
    destinations: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    for place, i in enumerate(order[:-1]):
        destinations[place**2 % len(destinations)].append(i)
    received = exchange_samples(mine, destinations, index=index)
    return (index, destinations), [key(sample) for sample in received]


@pytest.mark.parametrize(("world_size", "routes"), [(2, False), (4, True)])
def test_every_sample_arrives_once_bit_by_bit_in_the_order_of_the_plan(world_size: int, routes: bool) -> None:
    everything = [key(sample) for rank in range(world_size) for sample in make_samples(rank, routes=routes)]
    results = spawn(world_size, exchange, world_size, routes)
    assert len({repr(plan) for plan, _ in results}) == 1, "every rank knows the same"
    (_, destinations), _ = results[0]
    for rank, (_, received) in enumerate(results):
        assert received == [everything[i] for i in destinations[rank]]


def test_what_all_ranks_gather_of_a_sample_has_no_value_per_token() -> None:
    for sample in make_samples(2, routes=True):
        record = _without_tokens(sample)
        assert (record.token_ids, record.loss_mask, record.rollout_logprobs) == ([], [], [])
        assert record.routes is None
        assert not record.versions
        assert not record.token_weights
