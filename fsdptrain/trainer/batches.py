"""From the samples of all ranks to the packs that this rank trains on, one list for each optimizer step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.data.exchange import SampleIndex, exchange_samples, gather_index
from fsdptrain.data.packing import pack, plan_packs, plan_rows
from fsdptrain.models.inputs import Layout
from fsdptrain.types import PackedBatch, Sample


@dataclass(frozen=True)
class PackingRules:
    max_tokens: int  # of one pack
    aggregation: str
    max_response_len: int
    num_steps: int  # optimizer steps that share the rollout
    layout: Layout  # padded: a pack computes samples x longest tokens, and that is what the budget bounds


@dataclass(frozen=True)
class StepBatches:
    """The packs of one optimizer step on this rank; every rank has as many."""

    packs: list[PackedBatch]
    members: list[tuple[int, ...]]  # of each pack: its samples, by their number in `index`; () for an empty pack
    index: SampleIndex  # of all samples of the rollout
    fill: float
    imbalance: float


def make_batches(samples: Sequence[Sample], rules: PackingRules) -> list[StepBatches]:
    """Plan on the lengths of all ranks, send each sample to the rank that trains it, pack. Collective.

    Samples are dealt to the optimizer steps in turn, so that each step has its part of every rank's prompts.
    """
    index = gather_index(samples)
    make_plan = plan_packs if rules.layout == "packed" else plan_rows
    steps: list[StepBatches] = []
    for chosen in deal(len(index.lengths), rules.num_steps):
        lengths = [index.lengths[i] for i in chosen]
        plan = make_plan(lengths, num_ranks=dist.get_world_size(), max_tokens=rules.max_tokens)
        destinations = [[chosen[i] for packed in packs for i in packed] for packs in plan.packs]
        arrived = iter(exchange_samples(samples, destinations, index=index))
        totals = index.totals(chosen)
        packs = [
            pack(
                [next(arrived) for _ in members],
                aggregation=rules.aggregation,
                totals=totals,
                max_response_len=rules.max_response_len,
                pin_memory=platform.has_accelerator(),
            )
            for members in plan.packs[dist.get_rank()]
        ]
        members = [tuple(chosen[i] for i in packed) for packed in plan.packs[dist.get_rank()]]
        steps.append(StepBatches(packs, members, index, plan.fill, plan.imbalance))
    return steps


def deal(count: int, num_steps: int) -> Iterator[list[int]]:
    """Indices for each step, as even as they can be; a step without any is left out."""
    for step in range(num_steps):
        chosen = list(range(step, count, num_steps))
        if chosen:
            yield chosen
